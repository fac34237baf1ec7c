"""Loaders: turn seeds into batches. Order the seeds, split them over the ranks, draw negatives, and make
torch_geometric's batches.
"""
