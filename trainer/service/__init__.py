"""The graph service: graph servers, each of which serves the parts on its host, and their clients."""
