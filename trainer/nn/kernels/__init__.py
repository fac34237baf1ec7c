"""Operations of layers with autograd, by Numba kernels on CPU: aggregation, GraphSAGE, dropout, activation."""
