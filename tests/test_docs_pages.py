"""Tests of guides in docs/: their Python code is run unchanged."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from click.testing import CliRunner

from launching import REPOSITORY
from trainer.cli import cli


def blocks(page: str, language: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def partition(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["partition", *words])
    return done.exit_code, f"{done.output}{done.exception or ''}"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GNNFLEET_RUN_DIR", str(tmp_path))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as tests/trainer/conftest.py
    return tmp_path


def test_first_cluster_makes_a_graph_and_reports_damage() -> None:
    make, spoil = blocks("first_cluster.md", "python")
    (shown,) = blocks("first_cluster.md", "text")
    names: dict[str, object] = {}
    exec(make, names)
    words = ["make", "--dataset", "file", "--source", "graph.pt", "--num-parts", "3", "--out", "parts"]
    assert partition(*words)[0] == 0
    exec(spoil, names)
    status, text = partition(*words)
    pieces = [piece for piece in shown.strip().split("…") if piece]
    assert status == 1 and all(piece in text for piece in pieces), text


def run_script(source: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    exec(compile(source, "script.py", "exec"), {"__name__": "__main__"})
    assert not dist.is_initialized()


def typed_words(page: str, *beginning: str) -> list[str]:
    """Find the page's first command that starts with the words ``beginning``; return its other words."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = map(shlex.split, text.splitlines())
    return next(words[len(beginning) :] for words in lines if tuple(words[: len(beginning)]) == beginning)


def test_own_model_trains_and_resumes(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_class, load, script, trimmed = blocks("own_model.md", "python")
    assert partition(*typed_words("own_model.md", "python", "-m", "trainer", "partition"))[0] == 0
    run_script(script, typed_words("own_model.md", "python", "train_own.py"), monkeypatch)
    first = re.findall(r"val accuracy (0\.\d+)", capsys.readouterr().out)
    assert len(first) == 3 and float(first[-1]) > 0.5
    run_script(script, ["--parts", "parts/toy", "--epochs", "1", "--start", "output/model.pt"], monkeypatch)
    (again,) = re.findall(r"val accuracy (0\.\d+)", capsys.readouterr().out)
    assert float(again) > float(first[0])
    names: dict[str, object] = {}
    exec(trimmed, names)
    assert 0 < int(names["right"]) < 400  # type: ignore[call-overload]

    (inside / "models.py").write_text(own_class)
    train = yaml.safe_load(blocks("own_model.md", "yaml")[0])["train"]
    words = ["--model", train["model"], "--model-args", json.dumps(train["model_args"]), "--fanouts", "10,5"]
    words += ["--hidden", "32", "--epochs", "2", "--batch-size", "256", "--run-dir", "runs/RUN"]
    done = CliRunner().invoke(cli, ["train", "--parts", "parts/toy", *words])
    assert done.exit_code == 0, f"{done.output}{done.exception or ''}"
    names = {"x": torch.randn(3, 64), "edge_index": torch.tensor([[0, 1], [1, 2]])}
    exec(load, names)
    assert names["out"].shape == (3, 5)  # type: ignore[attr-defined]


def test_types_and_links_give_the_shown_results() -> None:
    graph, nodes, links = blocks("hetero_links.md", "python")
    names: dict[str, object] = {}
    exec(graph, names)
    words = ["--dataset", "file", "--source", "papers.pt", "--num-parts", "2", "--out", "parts/papers"]
    options = ["undirected=true", "reverse_types=true", "hold_out=paper__cites__paper"]
    status, text = partition("make", *words, *(word for option in options for word in ("--option", option)))
    assert status == 0, text
    exec(nodes, names)
    assert len(names["seeds"]) == 256  # type: ignore[arg-type]
    exec(links, names)
    ends = names["sources"], names["positives"], names["negatives"]
    assert {len(end) for end in ends} == {256}  # type: ignore[arg-type]
    assert names["held_out"].shape[0] == 2  # type: ignore[attr-defined]
    names["graph"].close()  # type: ignore[attr-defined]


def test_data_is_prepared_as_shown() -> None:
    (prepare,) = (block for block in blocks("data.md", "python") if "np.save" in block)
    exec(prepare, {})
    status, text = partition(*typed_words("data.md", "python", "-m", "trainer", "partition"))
    assert status == 0, text
    assert "note: mygraph/title.npy: left out" in text
