"""The algorithm `SRL` and its settings: configuration, validation, checkpointing, metrics, evaluation, resources."""
