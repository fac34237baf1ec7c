"""Reads the folder of a run and reports the state and the results of the run, as values, text and HTML."""
