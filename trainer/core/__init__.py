"""Basics that every package of the trainer imports: types, random numbers, compiled kernels, ranks."""
