"""Opens a graph in a training process: parts on this host, connections to others, row cache, order of the seeds."""
