"""Whether a file is as ``gnnfleet init`` wrote it: its first line ends in a digest of the rest."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

_SIGNED = re.compile(r"(# Written by `gnnfleet init`[^\n]*) Unedited: ([0-9a-f]{12})\n(.*)", re.DOTALL)


def signed(text: str) -> str:
    """``text``, whose first line is a comment, with the digest."""
    head, _, rest = text.partition("\n")
    return f"{head} Unedited: {_digest(head, rest)}\n{rest}"


def is_unedited(path: Path) -> bool:
    """Nothing is lost where such a file is written anew."""
    try:
        found = _SIGNED.fullmatch(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    return found is not None and found[2] == _digest(found[1], found[3])


def _digest(head: str, rest: str) -> str:
    return sha256(f"{head}\n{rest}".encode()).hexdigest()[:12]
