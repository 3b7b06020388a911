"""Models and results for other people: model cards and uploads."""
