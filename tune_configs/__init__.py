"""Studies, one question per file: what is varied, against what, and how the answer is read."""
