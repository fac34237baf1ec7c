"""Serving clusters: graph servers that outlive runs; runs attach to them by name."""
