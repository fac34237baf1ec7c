"""Datasets: synthetic, files, OGB and torch_geometric, all as one Dataset."""
