"""Tests of guides in docs/: their Python code is run unchanged."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import yaml
from click.testing import CliRunner

from launching import REPOSITORY, launch, local_config
from trainer.cli import cli
from waiting import DEADLINE


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


def test_own_model_trains(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    own_class, load, script, long_form, trimmed = blocks("own_model.md", "python")
    (inside / "models.py").write_text(own_class)
    monkeypatch.syspath_prepend(inside)
    monkeypatch.setitem(sys.modules, "models", ModuleType("models"))  # removed again after the test
    del sys.modules["models"]
    assert partition(*typed_words("own_model.md", "python", "-m", "trainer", "partition"))[0] == 0
    assert len(script.splitlines()) <= 25
    run_script(script, typed_words("own_model.md", "python", "train_own.py"), monkeypatch)
    val, test = re.findall(r"(?:val|test) accuracy (0\.\d+)", capsys.readouterr().out)
    assert float(val) > 0.5 and float(test) > 0.5
    assert set(torch.load("output/model.pt")) == set(sys.modules["models"].MyGNN(64, 32, 5, 2).state_dict())
    run_script(long_form, ["--parts", "toy", "--epochs", "2"], monkeypatch)
    assert len(re.findall(r"val accuracy (0\.\d+)", capsys.readouterr().out)) == 2
    names: dict[str, object] = {}
    exec(trimmed, names)
    assert 0 < int(names["right"]) < 400  # type: ignore[call-overload]

    train = yaml.safe_load(blocks("own_model.md", "yaml")[0])["train"]
    words = ["--model", train["model"], "--model-args", json.dumps(train["model_args"]), "--fanouts", "10,5"]
    words += ["--hidden", "32", "--epochs", "2", "--batch-size", "256", "--run-dir", "runs/RUN"]
    done = CliRunner().invoke(cli, ["train", "--parts", "toy", *words])
    assert done.exit_code == 0, f"{done.output}{done.exception or ''}"
    names = {"x": torch.randn(3, 64), "edge_index": torch.tensor([[0, 1], [1, 2]])}
    exec(load, names)
    assert names["out"].shape == (3, 5)  # type: ignore[attr-defined]


def under_torchrun(script: str, processes: int) -> str:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_short_script_runs_under_torchrun_and_under_the_launcher(inside: Path) -> None:
    own_class, _, script, *_ = blocks("own_model.md", "python")
    (inside / "models.py").write_text(own_class)
    (inside / "train_own.py").write_text(script)
    assert partition(*typed_words("own_model.md", "python", "-m", "trainer", "partition"))[0] == 0
    assert re.search(r"^val accuracy 0\.\d+, test accuracy 0\.\d+$", under_torchrun("train_own.py", 3), re.MULTILINE)
    config = local_config(inside, [1, 2])
    done = launch(config, "--", "python", "train_own.py")
    assert done.status == 0, done.output
    assert [line["epoch"] for line in done.metrics("eval")] == [1, 2, 3, 4, 5]
    assert done.result["metrics"]["test_accuracy"] > 0.3
    assert (done.run_dir / "output" / "node0" / "model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "accelerate"])
def test_other_training_loops_share_the_seeds(package: str, inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    monkeypatch.delenv("GNNFLEET_RUN_DIR")
    script = blocks("lightning.md", "python")[package == "accelerate"]
    # counts the seeds of all batches: those of the split, however many processes there are
    count = "batch = batch.to(" if package == "accelerate" else "return cross_entropy("
    told = "print(batch.batch_size, file=open('seeds-' + os.environ['RANK'], 'a'))"
    assert count in script
    (inside / "own.py").write_text(script.replace(count, f"{told}; {count}", 1))
    assert partition(*typed_words("lightning.md", "python", "-m", "trainer", "partition"))[0] == 0
    output = under_torchrun("own.py", 2)
    accuracies = re.findall(r"val accuracy (\d\.\d+)", output)
    assert float(accuracies[-1]) > 0.6, output
    assert sum(int(line) for rank in "01" for line in (inside / f"seeds-{rank}").read_text().split()) == 3 * 600
    assert accuracies[0] == accuracies[-1] if package == "lightning" else len(accuracies) == 3


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
