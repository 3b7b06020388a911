"""Checks for a machine with a GPU; `scripts/gpu_check.sh` runs them in order of value."""
