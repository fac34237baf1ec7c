"""Methods that assign each node of a graph to a part: METIS, streaming, frequency and simpler ones."""
