"""Sends what a run reports to experiment trackers: TensorBoard, Weights & Biases, MLflow."""
