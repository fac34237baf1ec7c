"""Programs that run on the nodes, standard library only.

Supervisors run with the trainer's Python, 3.10 or newer; all others with 3.8 or newer, since preflight also asks nodes
without a suitable Python.
"""
