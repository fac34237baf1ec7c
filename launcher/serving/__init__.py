"""Serving clusters: graph servers that keep running between runs; runs attach to them by name."""
