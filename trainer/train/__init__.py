"""Training: loop, evaluation, checkpoints, metrics."""
