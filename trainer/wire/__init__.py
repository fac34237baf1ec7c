"""The messages of the graph service: raw little-endian arrays, and typed values beside them."""
