"""Tests of docs/operating.md: its commands, on a run of two local nodes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import run
from launcher.config.schema import RunConfig
from launching import make_parts, own_ports

PAGE = (Path(__file__).resolve().parents[1] / "docs/operating.md").read_text()
WITHOUT_END = (
    "follow",
    "-f",
    "--watch",
)  # commands with these words wait for the run; they are called after its end
SCRIPT = """
import json, os, time
rank = int(os.environ["RANK"])
print("here is rank", rank, flush=True)
with open(os.path.join(os.environ["GNNFLEET_RUN_DIR"], f"metrics-rank{rank}.jsonl"), "a") as file:
    file.write(json.dumps({"t": time.time(), "kind": "step", "epoch": 1, "step": 0, "steps": 4, "loss": 0.5}) + chr(10))
time.sleep(300)
"""


def typed(*names: str) -> list[list[str]]:
    """Return the commands of the page whose first word is one of ``names``."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    words = [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]
    return [each for each in words if each[0] in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("operating")
    config = {"name": "toy", "transport": "local", "nodes": 2, "defaults": {"workdir": "node{node_rank}"}}
    config |= {
        "data": {
            "dataset": "synthetic",
            "options": {"num_nodes": 200},
            "partition": {"method": "hash"},
            "folder": "parts",
        },
        "run": own_ports(),
    }
    (folder / "cluster.yml").write_text(yaml.safe_dump(config))
    (folder / "toy.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("GNNFLEET_LEASES", str(folder / "leases"))
        launch = ["--config", "cluster.yml", "--run-id", "toy-1", "--detach", "--", sys.executable, "toy.py"]
        make_parts(folder / "cluster.yml")
        try:
            assert run(launch) == 0
            yield folder
        finally:
            run(["stop", "toy-1", "--now"])


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("GNNFLEET_LEASES", str(folder / "leases"))
    return folder


def run_cli(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str]:
    status = run(words)
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.slow
def test_commands_of_the_page(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = typed("status", "runs", "logs", "attach", "collect")
    assert {words[0] for words in asked} == {"status", "runs", "logs", "attach", "collect"}
    for words in asked:
        if not set(words) & set(WITHOUT_END):
            status, text = run_cli(capsys, words)
            assert status == 0 and "toy-1" in text or words[0] == "logs" and "here is rank" in text, (words, text)
    first, *others = typed("stop")
    status, text = run_cli(capsys, first)
    assert status == 0 and "no process of it is left on its 2 nodes" in text
    for words in others:
        assert run_cli(capsys, words)[0] == 0, words
    for words in [*asked, *typed("follow")]:
        if set(words) & set(WITHOUT_END):
            assert run_cli(capsys, words)[0] in (0, 130), words


def test_settings_of_the_page_are_the_defaults() -> None:
    shown = re.search(r"^```yaml\n(run:\n  on_interrupt:.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    for key, value in yaml.safe_load(shown[1])["run"].items():
        assert getattr(RunConfig(), key) == value, key
