"""Tests of ``--help``: its text fits a terminal of 80x40 (80x50 for two commands) and ends with an example."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from launcher.cli.main import gnnfleet, run

run(["--help"])  # registers all commands
WIDTH, LINES, LINES_OF_LAUNCH = 80, 44, 52


def commands(above: tuple[str, ...] = (), group: click.Group = gnnfleet) -> Iterator[tuple[str, ...]]:
    yield above
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands((*above, name), command)
        else:
            yield (*above, name)


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(words) or "gnnfleet")
def test_help(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run([*words, "--help"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if len(line) > WIDTH] == []
    assert len(lines) <= (LINES_OF_LAUNCH if words in (("launch",), ("sweep",)) else LINES)
    examples = [line for line in lines if line.startswith(f"    {' '.join(('gnnfleet', *words))}")]
    assert examples, "no example"
    assert lines[-1].startswith("    gnnfleet ")


def test_help_of_launch_has_all_options_of_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["launch", "--help"]) == 0
    text = capsys.readouterr().out
    shown = [each for each in gnnfleet.params if not getattr(each, "hidden", False) and each.name != "version"]
    assert [each.opts for each in shown if each.opts[0] not in text] == []
