"""Programs that run on the nodes, standard library only.

They run with Python 3.8 or newer, since preflight also asks nodes without a suitable Python; those in ``supervisor``
and ``peers`` run with that of the trainer, 3.10 or newer.
"""
