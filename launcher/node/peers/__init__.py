"""The supervisors of one run, connected: the lead node is the hub, the others are its members."""
