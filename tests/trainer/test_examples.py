"""Tests that run the commands of docs/examples.md unchanged and check that each example learns."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from forked import REPOSITORY, fork
from trainer.cli import cli
from waiting import DEADLINE

PAGE = REPOSITORY / "docs" / "examples.md"

#: Pattern of each script's result, and its minimum. Chance is 0.2 (plain, times), 0.125 (papers) and AUC 0.5.
BARS = {
    "train_mine": (r"test accuracy ([\d.]+)\n$", 0.6),
    "node_classification": (r"test accuracy ([\d.]+)\n$", 0.6),
    "weighted_sampling": (r"gain by weights \+([\d.]+)\n$", 0.01),
    "unsupervised_sage": (r"unsupervised rows: test accuracy ([\d.]+)\n$", 0.6),
    "full_inference": (r"with all neighbours ([\d.]+)\n$", 0.6),
    "temporal_classification": (r"\ntest accuracy ([\d.]+)\n", 0.6),
    "train_hetero": (r"test accuracy ([\d.]+)\n$", 0.5),
    "hetero_classification": (r"test accuracy ([\d.]+)\n$", 0.5),
    "link_prediction": (r"test, model: .*AUC ([\d.]+)\n$", 0.8),
}


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line]


MAKES = [words for words in commands() if words[:5] == ["python", "-m", "trainer", "partition", "make"]]
RUNS = [words for words in commands() if words[1].startswith("examples/")]


def named(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkout")
    (made / "examples").symlink_to(REPOSITORY / "examples")
    return made


@pytest.fixture
def parts(folder: Path, request: pytest.FixtureRequest) -> None:
    wanted = named(request.getfixturevalue("words"), "--parts")
    if (folder / wanted).exists():
        return
    (make,) = (words for words in MAKES if named(words, "--out") == wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        CliRunner().invoke(cli, make[3:], catch_exceptions=False)


def run(words: list[str], folder: Path) -> str:
    process = fork(words[1:], {**os.environ, "PYTHONPATH": str(REPOSITORY)}, folder)
    assert process.wait(DEADLINE) == 0, process.output
    assert "Warning" not in process.output
    return process.output


def test_the_page_runs_every_example() -> None:
    scripts = {path.name for path in (REPOSITORY / "examples").glob("*.py")}
    shown = set(re.findall(r"\]\(\.\./examples/(\w+\.py)\)", PAGE.read_text()))
    assert shown == scripts
    assert {Path(words[1]).stem for words in RUNS} == set(BARS) == {name[:-3] for name in scripts} - NOT_ALONE


FAST = {"train_hetero", "temporal_classification", "train_mine"}
NOT_ALONE = {"common", "prepare_debian", "remote_loader"}


def marks(words: list[str]) -> tuple[pytest.MarkDecorator, ...]:
    """Return no mark for the first command of a fast script; return the mark "slow" for all other commands."""
    first = words is next(each for each in RUNS if each[1] == words[1])
    return () if first and Path(words[1]).stem in FAST else (pytest.mark.slow,)


@pytest.mark.parametrize("words", [pytest.param(run, id=" ".join(run[1:4]), marks=marks(run)) for run in RUNS])
def test_an_example_learns(words: list[str], folder: Path, parts: None) -> None:
    pattern, bar = BARS[Path(words[1]).stem]
    output = run(words, folder)
    found = re.search(pattern, output)
    assert found and float(found[1]) >= bar, output
    if "temporal" in words[1]:
        assert "with time_attr: 0 of" in output and "without: 0 of" not in output
    if "link" in words[1]:
        (popular,) = re.findall(r"test, popularity: .*AUC ([\d.]+)", output)
        assert float(found[1]) > float(popular)
    if "full" in words[1]:
        assert (folder / named(words, "--out") / "rank0.npz").exists()
