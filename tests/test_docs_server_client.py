"""Tests of docs/server_client.md: its commands, with servers and clients on this machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import run
from launcher.config.schema import RunConfig
from launching import REPOSITORY
from trainer.core.train_config import TrainConfig
from waiting import DEADLINE

PAGE = (REPOSITORY / "docs/server_client.md").read_text()
WITHOUT_END = "--watch"
GRAPH = {"dataset": "synthetic", "options": {"num_nodes": 3000, "num_classes": 4}, "num_parts": 4}
TRAIN = {"hidden": 16, "fanouts": [4, 4], "batch_size": 256, "epochs": 1}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def typed() -> list[list[str]]:
    """Return the commands of the page, split into words. `serve stop` comes last."""
    found = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    return sorted(found, key=lambda words: words[1:3] == ["serve", "stop"])


def nodes(workdir: str, *roles: str) -> list[dict[str, str]]:
    return [{"host": "localhost", "role": role, "workdir": f"{workdir}{k}"} for k, role in enumerate(roles)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("page")
    files: Mapping[str, Mapping[str, Any]] = {
        "products.yml": {"name": "both", "nodes": nodes("b", "server", "server", "client"), "data": GRAPH},
        "serving.yml": {"nodes": nodes("s", "server", "server"), "data": GRAPH | {"replicas": 2}},
        "train.yml": {"name": "train", "nodes": nodes("c", "worker"), "data": {"serving": "products"}},
        "cluster.yml": {"name": "other", "nodes": nodes("d", "worker"), "data": GRAPH},
    }
    for name, values in files.items():
        run_settings = {"encrypt": "on", "start_timeout": 300, "runs_dir": "runs"}
        whole = {"transport": "local", **values, "train": TRAIN, "run": run_settings}
        (folder / name).write_text(yaml.safe_dump(whole))
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("GNNFLEET_LEASES", str(folder / "leases"))
        patch.setenv("TMUX_TMPDIR", str(tmp_path_factory.mktemp("tmux")))
        patch.delenv("TMUX", raising=False)
        try:
            yield folder
        finally:
            run(["serve", "stop", "products", "--now"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_the_page_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in typed():
        if words[0] == "python":
            done = python(folder, words[1:])
            assert re.search(r"^test accuracy 0\.\d{4} of 600 nodes$", done, re.MULTILINE), done
        elif WITHOUT_END not in words:
            status = run([*(["--plain"] if words[1] == "--config" else []), *words[1:]])
            output = capsys.readouterr()
            assert status == 0, (words, output.out + output.err)
            expect(words, output.out)
    assert {path.name for path in folder.glob("*.key")} == {"products.key", "ann.key"}


def expect(words: list[str], output: str) -> None:
    if words[1:3] == ["serve", "status"] and "--json" not in words:
        assert output.startswith("serving cluster products is up: 2 servers, 4 parts"), output
    elif words[1:3] == ["serve", "stop"]:
        assert "run products: no process of it is left on its 2 nodes" in output
    elif words[-1] == "train.yml":
        assert "attached to serving cluster products: 2 servers, 4 parts" in output and "test accuracy" in output


def python(folder: Path, words: list[str]) -> str:
    # runs/RUN/… in its arguments stands for the newest checkpoint
    saved = max(folder.glob("runs/*/checkpoints/last.pt"), key=lambda path: path.stat().st_mtime)
    words = [str(saved) if word.startswith("runs/RUN/") else word for word in words]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_shown_plan_is_that_of_the_shown_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A dry run of the page's config file prints the plan that the page shows, except for the sizes in the last column.
    (tmp_path / "products.yml").write_text(blocks("yaml")[0])
    assert run(["--config", str(tmp_path / "products.yml"), "--dry-run"]) == 0
    output = rows(capsys.readouterr().out)
    (shown,) = (rows(block) for block in blocks("text") if "asks first" in block)
    assert len(shown) == 6 and set(shown) <= set(output), output


def rows(text: str) -> list[str]:
    return [" ".join(line.split()[:-2]) for line in text.splitlines() if re.match(r"  node", line)]


def test_settings_of_the_page_are_the_defaults() -> None:
    shown = yaml.safe_load(blocks("yaml")[-1])
    for section, defaults in (("run", RunConfig()), ("train", TrainConfig())):
        for key, value in shown[section].items():
            assert getattr(defaults, key) == value, key


def test_every_setting_of_servers_and_clients_is_described() -> None:
    keys = {key for key in RunConfig.__dataclass_fields__ if key.startswith("server_")} | {
        "restarts",
        "wire_rows",
    }
    assert {key for key in keys | {"replicas", "serving"} if not re.search(rf"\b{key}\b", PAGE)} == set()
