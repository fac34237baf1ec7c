"""Tests of ``gnnfleet explain``, and of the line after an error message that names this command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.report.explain import explanations, hint, search, sections, troubleshooting_page
from launcher.report.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]


def test_codes_of_errors_are_explained_and_the_page_is_up_to_date() -> None:
    codes = [entry.code for section in sections() for entry in section.entries]
    assert len(codes) == len(set(codes)) == len(explanations())
    sources = [path.read_text() for package in ("launcher", "trainer") for path in (ROOT / package).rglob("*.py")]
    used = {code for text in sources for code in re.findall(r'\bcode ?= ?"([a-z-]+)"', text)}
    assert used and used <= set(codes)
    assert (ROOT / "docs/troubleshooting.md").read_text() == troubleshooting_page()


def test_search_by_code_and_words() -> None:
    assert [entry.code for entry in search("host-key-unknown")] == ["host-key-unknown"]
    assert "login-refused" in {entry.code for entry in search("authorized_keys")}
    assert search("nonsense that nobody writes") == []
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:15026"
    assert [entry.code for entry in search(closed)] == ["peer-closed"]


def test_hint_names_each_code_once() -> None:
    assert hint(["", "stalled", "stalled"]) == "Explain: gnnfleet explain stalled" and hint([""]) == ""


def test_the_end_of_a_process_has_a_code() -> None:
    lost = Outcome.of_node(1, "b", "no sign of life", 1.0)
    stall = {"kind": "stall", "text": "no step", "node_rank": 0, "rank": 0}
    assert lost.code == "node-lost" and Outcome.of_finding(stall, "a", 1.0).code == "stalled"
    traceback = (
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "ModuleNotFoundError: y",
    )
    raised = Outcome("rank0", 0, "a", 0, 1, None, None, 1.0, True, False, False, "", traceback, traceback)
    assert raised.code == "missing-module"


def test_the_explain_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "host-key-unknown"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("host-key-unknown\n") and "cause:" in shown and "fix:" in shown
    assert run(["explain"]) == 0 and "unreachable" in capsys.readouterr().out
    assert run(["explain", "nothing-of-this-name"]) == 2
    shown = capsys.readouterr().err
    assert "`gnnfleet explain` lists all codes" in shown and "Usage" not in shown


def test_a_finding_that_blocks_is_followed_by_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cluster.yml"
    config.write_text("nodes: [{host: 127.0.0.1, port: 1}]\ndata: {dataset: synthetic}\n")
    assert run(["check", "--config", str(config)]) == 3
    shown = capsys.readouterr()
    assert "Explain: gnnfleet explain unreachable" in shown.out + shown.err


def test_mistakes_on_the_command_line_have_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "gone"]) == 2
    assert "Explain" not in capsys.readouterr().err
