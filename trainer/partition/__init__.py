"""Partitions graphs, and writes, verifies and describes partition folders."""
