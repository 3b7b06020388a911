"""The learner of the stub engine: skills by domain in place of a model, changed by the law of `engine/stub/law.py`."""
