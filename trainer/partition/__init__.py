"""Dividing a graph and keeping the parts on disk."""
