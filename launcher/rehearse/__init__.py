"""``gnnfleet rehearse``: runs the plan of a cluster on this machine, on a smaller graph, with faults on request."""
