"""Finds out how the processes of a node are: progress, stalls, expired waits, Python stacks, out-of-memory kills."""
