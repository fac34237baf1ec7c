"""How a setting is declared: a field of a dataclass with a help text, limits, and the texts that it accepts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Form:
    """The texts that a key accepts. Shells quote them all; a form refuses what no quoting makes harmless."""

    pattern: str
    words: str  #: what is accepted, for messages


#: Control characters and line ends, for a character class.
CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028\u2029"

#: The texts of most keys: comments of scripts, ``#SBATCH`` lines and lines of a log hold them.
LINE = Form(f"[^{CONTROLS}]*", "one line without control characters")

#: Texts that may have several lines.
LINES = Form(f"[^{CONTROLS}]*([\n\t][^{CONTROLS}]*)*", "text without control characters")

#: Values of any type, which reach commands as JSON or as one quoted word.
ANY = Form("(?s:.*)", "text")

#: Words that a command must not take for an option.
WORD = Form(f"(?!-)[^{CONTROLS}]*", "one line that does not begin with -")


def setting(help: str, default: Any = ..., form: Form = LINE, keys: Form = LINE, **limits: float) -> Any:
    """Return a dataclass field with a one-line help text, a default and limits.

    ``default`` is a value, a factory, or ``...`` for a required key. ``form``: that of the text, or of each text in a
    list or mapping. ``keys``: that of the names in a mapping. ``limits`` are ``at_least``, ``above``, ``at_most`` and
    ``below``; they apply to each element of a list.
    """
    metadata = {"help": help, "limits": limits, "form": form, "keys": keys}
    if default is ...:
        return field(metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
