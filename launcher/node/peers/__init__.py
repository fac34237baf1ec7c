"""Connections between the supervisors of a run: the lead node is the hub, the other nodes are members."""
