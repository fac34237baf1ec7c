"""First on PYTHONPATH of the ranks, for the module that Python imports at its start."""
