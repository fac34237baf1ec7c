"""``gnnfleet setup``: makes or repairs the Python environment of each host, with the versions of this machine."""
