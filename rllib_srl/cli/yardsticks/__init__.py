"""Exact values to compare policies with."""
