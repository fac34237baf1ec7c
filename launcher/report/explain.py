"""Explanations of errors, in explanations.yml; each has a code, such as ``host-key-unknown``, which the error carries.

``gnnfleet explain`` prints them, and docs/troubleshooting.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from launcher.files import CODE_ROOT

_FILE = Path(__file__).with_name("explanations.yml")


@dataclass(frozen=True)
class Explanation:
    """Cause and fix of one problem."""

    code: str  #: ``host-key-unknown``
    cause: str  #: Markdown
    fix: str  #: Markdown
    messages: tuple[str, ...] = ()  #: words of a message that is not gnnfleet's own
    exceptions: tuple[str, ...] = ()  #: types of exceptions in the tracebacks of scripts


@dataclass(frozen=True)
class Topic:
    """Explanations of one subject, which are one section of docs/troubleshooting.md."""

    title: str
    intro: str  #: Markdown
    entries: tuple[Explanation, ...]


@cache
def sections() -> tuple[Topic, ...]:
    return tuple(
        Topic(section["section"], section["intro"], tuple(Explanation(**entry) for entry in section["entries"]))
        for section in yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    )


@cache
def explanations() -> dict[str, Explanation]:
    return {entry.code: entry for section in sections() for entry in section.entries}


def search(words: str) -> list[Explanation]:
    """Return the explanations of a code, of a pasted message of others, or that contain all ``words``."""
    if words in explanations():
        return [explanations()[words]]
    wanted = words.lower()
    return [
        entry
        for entry in explanations().values()
        if any(message.lower() in wanted for message in entry.messages)
        or all(
            word in " ".join((entry.code, *entry.messages, entry.cause, entry.fix)).lower() for word in wanted.split()
        )
    ]


def hint(codes: Iterable[str]) -> str:
    """Return ``Explain: gnnfleet explain CODE``, one line for each different code; '' without a code."""
    return "\n".join(f"Explain: gnnfleet explain {code}" for code in dict.fromkeys(codes) if code)


def as_text(entry: Explanation) -> str:
    messages = (f"  message:   {message}" for message in entry.messages)
    return "\n".join((entry.code, *messages, f"  cause:    {entry.cause}", f"  fix:      {entry.fix}"))


def troubleshooting_page() -> str:
    lines = [_FILE.with_name("troubleshooting_start.md").read_text(encoding="utf-8").rstrip()]
    for section in sections():
        lines += ["", f"## {section.title}", "", section.intro, "", "| code | meaning, and what to do |", "|---|---|"]
        for entry in section.entries:
            messages = "".join(f"<br>`{message}`" for message in entry.messages)
            lines.append(f"| **{entry.code}**{messages} | {entry.cause} {entry.fix} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    (CODE_ROOT / "docs/troubleshooting.md").write_text(troubleshooting_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
