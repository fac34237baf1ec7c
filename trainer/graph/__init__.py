"""Opens a graph in a training process: parts on this host, connections to graph servers, row cache, seed order."""
