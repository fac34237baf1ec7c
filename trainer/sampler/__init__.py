"""Seeds → sampled subgraphs and rows: kernels that release the GIL, one hop, many hops, requests to the owners."""
