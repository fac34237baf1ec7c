"""First folder on the PYTHONPATH of ranks, so that Python imports its ``sitecustomize`` at startup."""
