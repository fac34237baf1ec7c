"""Sampling and gathering on a CUDA device, with kernels of numba-cuda (extras ``cuda12`` and ``cuda13``)."""
