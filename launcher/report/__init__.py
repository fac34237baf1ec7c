"""Reads the folder of a run and reports its state and results, as values, text and HTML."""
