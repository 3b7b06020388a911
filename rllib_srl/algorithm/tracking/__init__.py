"""Sends metrics and settings of a run to experiment trackers: TensorBoard, Weights & Biases, MLflow, Trackio."""
