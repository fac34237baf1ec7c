"""Loaders: seeds → batches; order of the seeds, split over the ranks, negatives, and torch_geometric's batches."""
