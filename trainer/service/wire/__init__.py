"""The messages of the graph service: raw little-endian arrays, and typed requests and replies made of them."""
