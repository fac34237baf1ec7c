"""The graph service: answers sampling and gathering for the parts a host owns."""
