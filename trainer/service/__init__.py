"""The graph service: graph servers, which sample and gather from the parts of a host, and their clients."""
