"""The in-memory tables of items and groups."""
