"""Seeds → sampled subgraphs and rows: kernels without the GIL, one hop, many hops, routing to the owners."""
