"""A few host names → a first cluster.yml."""
