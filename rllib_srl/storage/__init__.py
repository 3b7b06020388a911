"""Files: sealed checkpoints, weights, event files, local paths, and errors of a full disk."""
