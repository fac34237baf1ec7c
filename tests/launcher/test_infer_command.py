"""Tests of ``gnnfleet infer`` and ``gnnfleet inspect``, which find checkpoint and parts of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.command import Command
from launcher.config.loader import to_yaml
from launcher.plan import partition
from operate_kit import LocalRun
from run_kit import make_parts


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Return the arguments of each call of the trainer, which is not started."""
    words: list[list[str]] = []

    def run_trainer(command: Command) -> int:
        words.append([str(word) for word in command.argv[3:]])
        return 7

    monkeypatch.setattr(partition, "run_trainer", run_trainer)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return words


def test_infer_knows_checkpoint_and_parts_of_the_run(
    called: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = LocalRun(tmp_path).launched("end")
    (made.folder / "config.yml").write_text(to_yaml(made.config))
    assert run(["infer", "r1"]) == 2 and "if it saved one, `gnnfleet collect r1` fetches it" in capsys.readouterr().err
    checkpoint = made.folder / "checkpoints/last.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("")
    assert run(["infer", "r1"]) == 2 and "give their folder with --parts" in capsys.readouterr().err
    make_parts(tmp_path / "parts")
    assert run(["infer", "r1", "--probabilities", "--top-k", "3"]) == 7 and run(["inspect"]) == 7
    files = ["--checkpoint", "runs/r1/checkpoints/last.pt", "--parts", str(tmp_path / "parts")]
    assert called[0] == ["infer", *files, "--out", "runs/r1/predictions", "--probabilities", "--top-k", "3"]
    assert called[1] == ["partition", "inspect", str(tmp_path / "parts")]
    assert run(["infer", "r1", "--parts", "there", "--out", "here"]) == 7
    assert called[2][-4:] == ["--parts", "there", "--out", "here"]
    assert run(["infer", "--top-k", "3"]) == 7 and called[3] == [*called[0][:7], "--top-k", "3"]  # the newest run


def test_infer_needs_a_model_of_the_bundled_trainer(
    called: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalRun(tmp_path).launched("end", own_command=("python", "train.py"))
    assert run(["infer", "r1"]) == 2 and "trained a script of yours" in capsys.readouterr().err
    assert called == []
