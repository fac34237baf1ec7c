"""Models, layers (most of them for blocks), sharded embeddings, and losses and metrics of link prediction."""
