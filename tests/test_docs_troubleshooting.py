"""Tests that launcher/report/explanations.yml explains messages that our packages can show, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.report.explain import contains, plain, sections, troubleshooting_page
from messages import fixed, messages, spoken_texts

PAGE = Path(__file__).resolve().parents[1] / "docs/troubleshooting.md"
FEWEST_LETTERS = 5  #: minimum length of a listed message; shorter ones occur in any text
LISTED = [
    (section, plain(message)) for section in sections() for entry in section.entries for message in entry.messages
]


def test_every_explained_message_can_be_shown() -> None:
    ours = [listed for section, listed in LISTED if not section.others]
    short = [listed for listed in ours if len(re.findall(r"[A-Za-z]", listed)) < FEWEST_LETTERS]
    assert short == [], "these texts are too short to identify a message"
    texts = [fixed(message.text) for message in messages()]
    left = [listed for listed in ours if not any(contains(text, listed) for text in texts)]
    unknown = [listed for listed in left if not any(contains(text, listed) for text in spoken_texts())]
    assert unknown == [], "no package contains these messages"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == troubleshooting_page(), "run: python -m launcher.report.explain"
    for section in sections():
        for entry in section.entries:
            assert all(" | " not in cell for cell in (entry.messages[0], entry.cause, entry.fix)), entry.code
