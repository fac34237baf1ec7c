"""Programs that run on a node: Python 3.8 or newer, standard library only."""
