"""Models and layers that run on blocks."""
