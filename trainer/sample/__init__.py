"""Neighbour sampling: kernels without the GIL, one hop, many hops, routing to owners."""
