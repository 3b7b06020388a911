"""Games and puzzles of one or several turns."""
