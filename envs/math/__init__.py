"""Mathematical and other questions with one right answer, and the grading of answers."""
