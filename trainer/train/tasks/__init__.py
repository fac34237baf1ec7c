"""Tasks of the bundled trainer: what a model learns, its loss and its metrics."""
