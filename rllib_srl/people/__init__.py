"""People in the loop: they rate stored answers of a run; the ratings train and schedule (docs/serving.md)."""
