"""Modules that all packages of the trainer use: type aliases, errors, random numbers, compiled kernels, ranks."""
