"""gnnfleet's orchestrator: turns a YAML list of SSH hosts into one training cluster.

It never imports torch or ``trainer``; the two packages meet through command lines,
environment variables and the files described in ``docs/ARCHITECTURE.md``.
"""

__version__ = "0.1.0"
