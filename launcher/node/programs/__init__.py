"""Programs that are sent over and run once on a node, in Python 3.8 and with the standard library only."""
