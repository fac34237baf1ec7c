"""Sends the files of a plan to the nodes, verifies them, and fetches logs and results."""
