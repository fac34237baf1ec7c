"""Measures on one machine how the work of training grows with the number of hosts. Predicts times on real hosts."""
