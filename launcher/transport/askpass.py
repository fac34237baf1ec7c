"""Handing a password to OpenSSH's client: through a pipe in a private folder, never by words or environment."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from launcher.transport.hop import Hop
from launcher.transport.login import Credentials

# The parent keeps the pipe open with the answer in it and empty lines behind, so nobody ever waits. Only prompts
# about the node's own login (or key) are answered: a jump host's get nothing.
_SCRIPT = """#!/bin/sh
case "$1" in *{about}*) read -r answer < {pipe}; printf '%s\\n' "$answer";; *) exit 1;; esac
"""

_EMPTY_ANSWERS = 8


def options(credentials: Credentials) -> dict[str, str]:
    """Options of ssh_config: nobody is asked, or only our program is."""
    if credentials.password is None and credentials.passphrase is None:
        return {"BatchMode": "yes"}
    return {"BatchMode": "no", "NumberOfPasswordPrompts": "1"}


def prepare(folder: Path, hop: Hop, credentials: Credentials) -> dict[str, str]:
    """Put program and pipe into ``folder`` (mode 0700); the environment that names them."""
    secret = credentials.passphrase if credentials.passphrase is not None else credentials.password
    if secret is None:
        return {}
    about = credentials.key if credentials.passphrase is not None else f"{hop.user}@{hop.host.lower()}"
    pipe, program = folder / "answer", folder / "askpass"
    os.mkfifo(pipe, 0o600)
    write_end = os.open(pipe, os.O_RDWR)
    os.write(write_end, secret.reveal().encode() + b"\n" * (1 + _EMPTY_ANSWERS))
    _KEPT_OPEN[folder] = write_end
    program.write_text(_SCRIPT.format(about=shlex.quote(about or ""), pipe=shlex.quote(str(pipe))))
    program.chmod(0o700)
    return {"SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": os.environ.get("DISPLAY", ":0")}


def forget(folder: Path) -> None:
    """Drop what was not read."""
    write_end = _KEPT_OPEN.pop(folder, None)
    if write_end is not None:
        os.close(write_end)


_KEPT_OPEN: dict[Path, int] = {}
