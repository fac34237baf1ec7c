"""Commands as argv lists, secrets that print as ``***``, and shell quoting."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Bytes that a shell might not take as they are.
_TO_ENCODE = re.compile(rb"[^A-Za-z0-9_./:,+ -]|(?<= ) |^ | $")


class Secret(str):
    """Text that prints as ``***``; ``reveal()`` returns the text itself."""

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def reveal(self) -> str:
        return str.__str__(self)


#: Words with which the name of a secret ends: some also without ``_`` before them, as in ``PGPASSWORD``, some never
#: alone, as ``PWD``. Several of a kind have numbers, as ``API_KEY_2``.
_SECRET_NAME = re.compile(
    r"(?i:(?!GNNFLEET_)(?:"
    r"\w*(?:SECRETS?|TOKEN|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|SECRET|PRIVATE|AUTH)_?KEY)"
    r"|(?:\w*_)?(?:KEY|KEY_ID|PASS|PW|AUTH|AUTHORIZATION|CREDS?|COOKIES?|JWT|BEARER|CONNECTION_STRING)"
    r"|\w*_(?:PWD|PAT|SAS|WEBHOOK(?:_URL)?))(?:_?\d+)?)"
)

#: A password in a URL, as in ``https://user:password@proxy:3128``, a signature or key in its query, or a header.
_SECRET_VALUE = re.compile(
    r"://[^/@\s]*:[^/@\s]+@|[?&][\w-]*(?:sig|signature|token|key|secret|password)=.|\bbearer \S{8}|\bauthorization:",
    re.IGNORECASE,
)


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable is a secret, by its name, as ``WANDB_API_KEY``, or its value, as a signed URL."""
    return _SECRET_NAME.fullmatch(name) is not None or _SECRET_VALUE.search(value) is not None


@dataclass(frozen=True)
class Command:
    """An argv list with environment variables, a working directory, and shell lines that run before it."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""  #: "" for the login directory
    setup: tuple[str, ...] = ()  #: shell lines run first, in the same shell (``module load``, ``conda activate``)


def render(command: Command) -> str:
    """Return ``command`` as bash source, with every word quoted except a leading ``~/``, which bash expands.

    Raises ValueError for a name in ``env`` that no variable can have.
    """
    if wrong := [name for name in command.env if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)]:
        raise ValueError(f"{wrong[0]!r} is not the name of a variable")
    lines = ["set -e", *command.setup]
    lines += [f"export {name}={quote(value)}" for name, value in sorted(command.env.items())]
    if command.cwd:
        lines.append(f"cd {quote(command.cwd)}")
    lines.append("exec " + " ".join(quote(word) for word in command.argv))
    return "\n".join(lines)


def shell_line(command: Command) -> str:
    """Return ``command`` as one line for any login shell (sh, bash, zsh, ksh, csh, tcsh, fish): ``exec bash -c …``.

    Quotes, history marks (``!``) and line breaks mean different things to these shells, so the line has none of the
    command's own: bash decodes ``\\\\x21``, a backslash in all of them. Single spaces stay, as old csh takes words of
    some thousand characters at most.
    """
    encoded = _TO_ENCODE.sub(lambda found: b"\\\\x%02x" % found[0][0], render(command).encode()).decode()
    return f'exec bash -c \'eval "set --; $(printf %b "$*")"\' bash {encoded}'


def quote(word: str) -> str:
    """Quote one word for a shell; a leading ``~/`` stays unquoted, so that the node's shell expands it."""
    plain = word.reveal() if isinstance(word, Secret) else word
    if plain.startswith("~/"):
        return "~/" + shlex.quote(plain[2:])
    return shlex.quote(plain)
