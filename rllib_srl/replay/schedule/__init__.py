"""Scheduling of items: grades of visits, spacing rules, due dates, slots of the memory in a batch."""
