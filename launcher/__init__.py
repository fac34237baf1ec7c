"""gnnfleet's orchestrator: turns a YAML list of SSH hosts into one training cluster.

It never imports torch or ``trainer``; the two packages meet through command lines,
environment variables and the files described in ``docs/ARCHITECTURE.md``.
"""

from __future__ import annotations

__version__ = "0.1.0"
