"""Programs sent to a node and run once: Python 3.8 or newer, standard library only."""
