"""The graph service: graph servers, which answer requests from the parts on their host, and the clients of graph
servers.
"""
