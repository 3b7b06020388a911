"""The trainer of a served model: a process of its own that trains one version, plays held-out prompts and judges."""
