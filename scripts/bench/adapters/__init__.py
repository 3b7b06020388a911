"""Benchmarks of adapters between learner and engine."""
