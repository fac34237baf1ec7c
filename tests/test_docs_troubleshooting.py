"""docs/troubleshooting.md has every message that our packages can show, and none that they cannot."""

from __future__ import annotations

import re
from pathlib import Path

from messages import Message, fixed, messages, spoken_texts

PAGE = (Path(__file__).resolve().parents[1] / "docs/troubleshooting.md").read_text()
FEWEST_LETTERS = 5  #: that an entry has; fewer would be found in anything


def entries() -> list[str]:
    """What the page lists: code in the first column of its tables, and lines of its blocks of plain text."""
    rows = re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)
    listed = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [entry for row in rows for entry in re.findall(r"`([^`]+)`", row)] + "".join(listed).splitlines()


def has(text: str, entry: str) -> bool:
    """Whether the entry's pieces occur in the text, in this order; … stands for anything."""
    at = 0
    for piece in entry.split("…"):
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


ENTRIES = [fixed(entry) for entry in entries()]


def test_every_message_has_an_entry() -> None:
    def told(message: Message) -> bool:
        return any(has(fixed(message.text), entry) for entry in ENTRIES)

    found = messages()
    assert len(found) > 600
    missing = [str(message) for message in found if not told(message)]
    assert missing == [], "no entry in docs/troubleshooting.md for:\n" + "\n".join(missing)


def test_every_entry_is_said() -> None:
    short = [entry for entry in ENTRIES if len(re.findall(r"[A-Za-z]", entry)) < FEWEST_LETTERS]
    assert short == [], "these would be found in anything"
    found = [fixed(message.text) for message in messages()]
    left = [entry for entry in ENTRIES if not any(has(text, entry) for text in found)]
    unsaid = [entry for entry in left if not any(has(text, entry) for text in spoken_texts())]
    assert unsaid == [], "none of our packages says that"


def test_every_row_has_cause_and_cure() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert rows
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split(" | ")) and row.count(" | ") == 2, row


def test_contents_name_all_sections() -> None:
    sections = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    contents = PAGE[PAGE.index("Contents:") : PAGE.index("## ")]
    anchors = re.findall(r"\]\(#([a-z-]+)\)", contents)
    assert [re.sub(r"[^a-z ]", "", each.lower()).replace(" ", "-") for each in sections] == anchors
