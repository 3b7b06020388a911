"""Maintenance programs: checks, measurements, model building and benchmarks."""
