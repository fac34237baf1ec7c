"""Commands as argv lists, secrets that print as ``***``, and the one place that quotes for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


class Secret(str):
    """Text that prints as ``***``; ``reveal()`` gives it to the boundary that needs it."""

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def reveal(self) -> str:
        return str.__str__(self)


@dataclass(frozen=True)
class Command:
    """An argv list with the surroundings it runs in."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""  #: "" is the login directory
    setup: tuple[str, ...] = ()  #: shell lines run before, in the same shell (module load, conda activate)


def render(command: Command) -> str:
    """``command`` as bash source, every word quoted; ``~/`` stays expandable in cwd and argv."""
    lines = ["set -e", *command.setup]
    lines += [f"export {name}={quote(value)}" for name, value in sorted(command.env.items())]
    if command.cwd:
        lines.append(f"cd {quote(command.cwd)}")
    lines.append("exec " + " ".join(quote(word) for word in command.argv))
    return "\n".join(lines)


def shell_line(command: Command) -> str:
    """``render`` wrapped for a login shell of any kind: ``bash -c '…'``."""
    return f"exec bash -c {shlex.quote(render(command))}"


def quote(word: str) -> str:
    """Quote one word; a leading ``~/`` is left for the node's shell to expand."""
    plain = word.reveal() if isinstance(word, Secret) else word
    if plain.startswith("~/"):
        return "~/" + shlex.quote(plain[2:])
    return shlex.quote(plain)
