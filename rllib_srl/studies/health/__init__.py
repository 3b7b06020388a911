"""The health battery: what a model can do and how it writes, before and after training.

`battery`        what is measured, and measuring one model
`harness`        the task files, run by the lm-eval harness in a process of its own
`degeneration`   repetition, length and entropy of sampled texts
`comparison`     paired changes from one model to the other, and gates on them
`tasks/`         task files of lm-eval with their questions, and openings of texts; all written for this package
"""
