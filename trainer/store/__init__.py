"""Opened partitions: memory-mapped topology and features."""
