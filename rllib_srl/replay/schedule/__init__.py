"""Scheduling of items: recall, spacing rules, grades of reviews, shares of slots."""
