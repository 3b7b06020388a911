"""Studies and searches, run through Ray Tune."""
