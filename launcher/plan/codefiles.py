"""Our own code that every node gets: which files, and one digest over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

CODE_ROOT = Path(__file__).resolve().parents[2]


def code_files() -> list[Path]:
    """The files a node needs, absolute and sorted: the supervisor's and all of ``trainer/``."""
    own = [CODE_ROOT / "launcher" / "__init__.py", *(CODE_ROOT / "launcher" / "node").rglob("*.py")]
    return sorted([*own, *(path for path in (CODE_ROOT / "trainer").rglob("*") if _is_code(path))])


def code_digest() -> str:
    """sha256 over the relative paths and contents of :func:`code_files`."""
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(f"{relative(path)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def relative(path: Path) -> str:
    """``path`` as it is named below a node's code folder."""
    return path.relative_to(CODE_ROOT).as_posix()


def file_sha256(path: Path) -> str:
    """Hex digest of a whole file."""
    with path.open("rb") as file:
        return _hex(iter(lambda: file.read(1 << 20), b""))


def _hex(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _is_code(path: Path) -> bool:
    hidden = any(part == "__pycache__" or part.startswith(".") for part in path.parts[len(CODE_ROOT.parts) :])
    return path.is_file() and not hidden
