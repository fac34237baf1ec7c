"""Measures on one machine how the work of training grows with the number of hosts; predicts times on real hosts."""
