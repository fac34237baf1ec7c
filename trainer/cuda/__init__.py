"""Sampling and gathering on a CUDA device, with kernels of numba-cuda (``pip install gnnfleet[cuda]``)."""
