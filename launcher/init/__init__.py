"""``gnnfleet init``: from a few host names to a commented cluster.yml; and the templates."""
