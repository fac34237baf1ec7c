"""How an environment for training is made on a host: one shell line, with versions pinned."""

from __future__ import annotations

from collections.abc import Sequence

OWN_VENV = "~/gnnfleet-venv"  #: where one is put when nobody says otherwise

WHEELS = "https://download.pytorch.org/whl/"


def new_venv(venv: str, pins: Sequence[str], tag: str) -> str:
    """The line that makes ``venv`` with ``pins`` in it; ``tag``: torch's build, as cpu or cu126, '' for PyPI's."""
    return f"python3 -m venv {venv} && {venv}/bin/pip install {' '.join([*pins, *index(tag)])}"


def index(tag: str) -> list[str]:
    """pip's words for where such a build of torch is."""
    return [f"--extra-index-url {WHEELS}{tag}"] if tag else []
