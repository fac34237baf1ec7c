"""Partitions a graph and writes, verifies and describes the partition folder."""
