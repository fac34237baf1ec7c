"""Finds explanations of error messages; each explanation has a code, such as ``host-key-unknown``.

The explanations are in explanations.yml. ``gnnfleet explain`` prints them, and docs/troubleshooting.md lists them.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from launcher.files import CODE_ROOT

_FILE = Path(__file__).with_name("explanations.yml")

_FOREIGN_EXCEPTION = re.compile(r"\braised (?!trainer\.)[\w.]+")  # an exception of a user's script or a library

_FEWEST_LETTERS = 8  # minimum length of the fixed words that identify a message; shorter ones match too much


@dataclass(frozen=True)
class Explanation:
    """Code, messages, cause and fix of one problem."""

    code: str  #: name of the explanation: ``host-key-unknown``
    messages: tuple[str, ...]  #: fixed words of the messages that report the problem; … stands for a value
    cause: str  #: Markdown; '' if the message says it all
    fix: str  #: Markdown


@dataclass(frozen=True)
class Section:
    """Explanations of one subject, which are one section of docs/troubleshooting.md."""

    title: str
    intro: str  #: Markdown
    others: bool  #: the messages are not gnnfleet's own
    self_explaining: bool  #: the messages say what is wrong and what to do; the page lists only the codes
    entries: tuple[Explanation, ...]


@cache
def sections() -> tuple[Section, ...]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(
        Section(
            section["section"],
            section["intro"],
            section.get("others", False),
            section.get("self_explaining", False),
            tuple(
                Explanation(entry["code"], tuple(entry["messages"]), entry.get("cause", ""), entry["fix"])
                for entry in section["entries"]
            ),
        )
        for section in yaml.load(_FILE.read_text(encoding="utf-8"), loader)
    )


@cache
def explanations() -> dict[str, Explanation]:
    return {entry.code: entry for section in sections() for entry in section.entries}


def explanation_of(message: str) -> Explanation | None:
    """Return the explanation of ``message``; None if there is none.

    The words around each ``…`` of a message pattern must occur in ``message``; the matching pattern with the most
    letters wins. Patterns of gnnfleet's own messages do not apply to exceptions of scripts and libraries.
    """
    text = plain(message)
    foreign = _FOREIGN_EXCEPTION.search(text) is not None
    best, most = None, _FEWEST_LETTERS - 1
    for section in sections():
        if foreign and not section.others:
            continue
        for entry in section.entries:
            for pattern in entry.messages:
                letters = sum(map(str.isalpha, pattern))
                if letters > most and contains(text, plain(pattern)):
                    best, most = entry, letters
    return best


def search(words: str) -> list[Explanation]:
    """Return the explanations that match ``words``, the argument of ``gnnfleet explain``.

    ``words``: a code, a part of a code, a message, a misspelt key of cluster.yml, or words that all occur in one
    explanation (code, messages, cause or fix).
    """
    if words in explanations():
        return [explanations()[words]]
    if " " in words and (found := explanation_of(words)):
        return [found]
    wanted = words.lower().split()
    matching = [entry for entry in explanations().values() if all(word in _haystack(entry) for word in wanted)]
    misspelt = (not matching or "_" in words) and _is_like_a_key(words)
    return [*([explanations()["unknown-key"]] if misspelt else []), *matching]


def _is_like_a_key(word: str) -> bool:
    from launcher.config.schema import settings
    from launcher.config.validation import sections as of_config

    keys = [item.name for section in of_config().values() for item in settings(section)]
    last = word.rpartition(".")[2]
    return last not in keys and bool(difflib.get_close_matches(last, keys, 1, 0.8))


def hint(*messages: str) -> str:
    """Return ``Explain: gnnfleet explain CODE`` for messages, one line for each code; '' if none is explained."""
    found = {entry.code: None for entry in map(explanation_of, messages) if entry}
    return "\n".join(f"Explain: gnnfleet explain {code}" for code in found)


def contains(text: str, pattern: str) -> bool:
    """Whether the pieces of ``pattern``, split at each ``…``, occur in ``text`` in the same order.

    Both arguments are results of ``plain``.
    """
    at = 0
    for piece in pattern.split("…"):
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@cache
def plain(text: str) -> str:
    """Return ``text`` without backticks and with single spaces."""
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


def as_text(entry: Explanation) -> str:
    return "\n".join(
        (
            entry.code,
            *(f"  message:  {message}" for message in entry.messages[:5]),
            *([f"  ({len(entry.messages) - 5} more messages)"] if len(entry.messages) > 5 else []),
            *([f"  cause:    {entry.cause}"] if entry.cause else []),
            f"  fix:      {entry.fix}",
        )
    )


def troubleshooting_page() -> str:
    lines = [(_FILE.with_name("troubleshooting_start.md")).read_text(encoding="utf-8").rstrip(), ""]
    for section in sections():
        lines += [f"## {section.title}", ""]
        if section.intro:
            lines += [section.intro, ""]
        if section.self_explaining:
            codes = ", ".join(f"`{entry.code}`" for entry in section.entries)
            lines += [f"The message says what is wrong and what to do; `gnnfleet explain CODE` says more: {codes}.", ""]
            continue
        if explained := [entry for entry in section.entries if entry.cause]:
            lines += ["| code and message | meaning, and what to do |", "|---|---|", *map(_row, explained), ""]
        lines += [*(f"- **{entry.code}**: {entry.fix}" for entry in section.entries if not entry.cause), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _row(entry: Explanation) -> str:
    return f"| **{entry.code}**<br>`{entry.messages[0]}` | {entry.cause} {entry.fix} |"


def _haystack(entry: Explanation) -> str:
    return " ".join((entry.code, *entry.messages, entry.cause, entry.fix)).lower()


def main() -> None:
    (CODE_ROOT / "docs/troubleshooting.md").write_text(troubleshooting_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
