"""Sweeps: many runs of one config with different values, side by side on disjoint hosts."""
