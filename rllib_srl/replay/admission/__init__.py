"""Admission checks of the memory: duplicates, degenerate text, broken log-probs, secrets."""
