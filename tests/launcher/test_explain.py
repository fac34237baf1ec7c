"""Tests of ``gnnfleet explain``, and of the hint at the end of an error message that names this command."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.report.explain import explanation_of, explanations, hint, search, sections, troubleshooting_page


def test_codes_are_unique_and_complete() -> None:
    codes = [entry.code for section in sections() for entry in section.entries]
    assert len(codes) == len(set(codes)) == len(explanations()) > 200
    for entry in explanations().values():
        assert entry.messages and entry.fix, entry.code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("node1 (gnn2): host key of gnn2 is not known (SHA256:abc) – log in once", "host-key-unknown"),
        ("node1 (gnn2): connection refused on port 2222 – start sshd", "connection-refused"),
        ("node0 (a): tmux is not installed – `sudo apt-get install -y tmux`", "no-tmux"),
        ("rank 1 on node0 raised torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB", "gpu-out-of-memory"),
        ("OSError: [Errno 28] No space left on device", "no-space"),
    ],
)
def test_an_error_names_its_code(message: str, code: str) -> None:
    found = explanation_of(message)
    assert found is not None and found.code == code
    assert hint(message) == f"Explain: gnnfleet explain {code}"


def test_an_unknown_message_has_no_code() -> None:
    assert explanation_of("ValueError: rank 1 does not like this") is None and hint("x") == ""
    assert explanation_of("rank 0 on node0 raised ValueError: shapes must agree") is None, "not an error of gnnfleet"
    ours = explanation_of("rank 0 on node0 raised trainer.core.errors.DataError: x: shapes must agree")
    assert ours is not None and ours.code == "shape-mismatch"


def test_search_by_code_message_and_words() -> None:
    assert [entry.code for entry in search("no-tmux")] == ["no-tmux"]
    assert [entry.code for entry in search("connection refused on port 22")] == ["connection-refused"]
    assert {"password-prompt", "password-rejected"} <= {entry.code for entry in search("password")}
    assert search("nonsense that nobody writes") == []
    assert search("num_part")[0].code == search("data.num_part")[0].code == search("epochss")[0].code == "unknown-key"
    assert "unknown-key" not in [entry.code for entry in search("num_parts")]
    assert [entry.code for entry in search("straggler")] == ["slow-rank"]
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:15026"
    assert [entry.code for entry in search(closed)] == ["peer-closed"] and "lost-rank" in search(closed)[0].fix


def test_the_explain_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "host-key-unknown"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("host-key-unknown\n") and "cause:" in shown and "fix:" in shown
    assert run(["explain"]) == 0 and "no-tmux" in capsys.readouterr().out
    assert run(["explain", "nothing-of-this-name"]) == 2
    shown = capsys.readouterr().err
    assert "`gnnfleet explain` lists all codes" in shown and "Usage" not in shown


def test_an_explanation_without_a_cause_has_no_line_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "no-config"]) == 0
    shown = capsys.readouterr().out
    assert "fix: " in shown and "cause" not in shown


def test_the_page_lists_every_code_and_explains_each_once() -> None:
    page = troubleshooting_page()
    for section in sections():
        for entry in section.entries:
            rows = page.count(f"**{entry.code}**")
            assert rows == (0 if section.self_explaining else 1) and (rows or f"`{entry.code}`" in page), entry.code


def test_a_finding_that_blocks_is_followed_by_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cluster.yml"
    config.write_text("nodes: ['127.0.0.1:1']\ndata: {dataset: synthetic}\n")
    assert run(["check", "--config", str(config)]) == 3
    shown = capsys.readouterr()
    assert "Explain: gnnfleet explain connection-refused" in shown.out + shown.err


def test_mistakes_on_the_command_line_have_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "gone"]) == 2
    assert "Explain" not in capsys.readouterr().err
