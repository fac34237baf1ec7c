"""Multi-node launcher: starts one distributed training run on the SSH hosts of a YAML file.

It never imports torch, nor ``trainer`` but for the settings that it writes and the trainer reads. The two packages
exchange command lines, environment variables and the files described in ``docs/ARCHITECTURE.md``.
"""

from __future__ import annotations

__version__ = "0.1.0"
