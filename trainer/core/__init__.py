"""What every package of the trainer uses: types, random numbers, compiled kernels, ranks."""
