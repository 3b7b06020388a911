"""Compares the nodes of a cluster before a run starts: packages, model, cards and the run's directory."""
