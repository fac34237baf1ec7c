"""Training: loop, evaluation, checkpoints, metrics, full-graph inference."""
