"""Differentiable operations of layers: aggregation, GraphSAGE, dropout, activation. On CPU they use Numba kernels."""
