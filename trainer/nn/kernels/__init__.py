"""Numba kernels with autograd: aggregation, dropout, activation."""
