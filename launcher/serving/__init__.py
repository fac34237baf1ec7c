"""Serving clusters: graph servers that live longer than a run; runs attach to them by name."""
