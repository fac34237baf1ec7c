"""Entry point of ``python -m trainer``."""

from __future__ import annotations

from trainer.cli import main

if __name__ == "__main__":
    main()
