"""Programs that run on the nodes: Python 3.8 or newer, standard library only."""
