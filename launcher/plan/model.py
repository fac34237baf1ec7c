"""Values inside a plan: a file that it wants on a node, and the login of a node."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from launcher.config.schema import login_text
from launcher.plan.codefiles import file_sha256


@dataclass(frozen=True)
class Login:
    """How SSH reaches a node, as far as the cluster file says; the rest is for ssh_config to say."""

    user: str | None
    host: str
    port: int | None

    def __str__(self) -> str:
        return login_text(self.user, self.host, self.port)


@dataclass(frozen=True)
class PlannedFile:
    """One file to be on the node before start.

    Exactly one of source and content is set; neither for what is made at launch (service.key).
    """

    dest: str  #: path on the node
    bytes: int  #: 0 when made at launch
    source: str = ""  #: path on this machine
    content: str = ""  #: generated text; a ``Secret`` when ``secret``
    sha256: str = ""  #: '' when made at launch
    mode: int = 0o644
    secret: bool = False


def generated(dest: str, content: str, *, mode: int = 0o644, secret: bool = False) -> PlannedFile:
    """A file whose text the plan itself holds."""
    raw = content.encode()
    return PlannedFile(dest, len(raw), "", content, hashlib.sha256(raw).hexdigest(), mode, secret)


def copied(dest: str, source: Path, *, mode: int = 0o644) -> PlannedFile:
    """A file of this machine, read for its size and digest."""
    return PlannedFile(dest, source.stat().st_size, str(source), "", file_sha256(source), mode)
