"""``Dataset``, a graph with its attributes and splits, and how it is built from raw arrays, checked and stored."""
