"""Served answers, and the versions of the model that were trained on their ratings (docs/serving.md)."""
