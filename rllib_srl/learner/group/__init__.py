"""The group of learners: calls to all of them, and their start in limited time."""
