"""Sampling: from seed nodes to subgraphs and the attributes of their nodes and edges."""
