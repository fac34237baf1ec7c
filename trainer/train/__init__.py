"""Training: loop, evaluation, checkpoints, metrics, regrouping, full-graph inference."""
