"""Writes a first cluster.yml for given hosts (``gnnfleet init``)."""
