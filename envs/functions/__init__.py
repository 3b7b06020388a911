"""Function calling: requests, simulated programs, and expected calls."""
