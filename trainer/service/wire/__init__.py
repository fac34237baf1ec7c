"""Messages of the graph service: frames of raw little-endian arrays, and typed requests and replies."""
