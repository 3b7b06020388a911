"""The in-memory tables of items and groups, and their indexes."""
