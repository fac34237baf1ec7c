"""Loaders: split seeds over the ranks, draw negatives, and convert sampled subgraphs to torch_geometric's batches."""
