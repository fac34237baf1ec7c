"""gnnfleet's distributed trainer: partitions, sampling, graph service, training.

It never imports ``launcher``; the two packages meet through command lines, environment
variables and the files described in ``docs/ARCHITECTURE.md``.
"""

__version__ = "0.1.0"
