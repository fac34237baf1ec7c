"""Golden files of messages: what users read, kept as text that can be read aloud."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def check_messages(module: str, messages: Iterable[tuple[str, str]]) -> None:
    """Compare ``(how it was provoked, what was said)`` with golden/messages_<module>.txt.

    UPDATE_GOLDEN=1 writes the file anew; read the difference before committing it.
    """
    blocks = [f"# {how}\n{said.rstrip()}\n" for how, said in messages]
    path = GOLDEN / f"messages_{module}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("\n".join(blocks), encoding="utf-8")
    assert "\n".join(blocks) == path.read_text(encoding="utf-8")
