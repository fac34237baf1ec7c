"""A run's folder → what came of the run, as values, text and HTML."""
