"""Runs one node of a run: ranks, graph server, logs and outcomes."""
