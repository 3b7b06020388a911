"""Scheduling of items: recall, spacing rules, grades of reviews, load control."""
