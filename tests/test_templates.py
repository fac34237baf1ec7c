"""Tests of templates/: each file loads and can be planned. Templates with local nodes are also launched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.loader import load_config
from launcher.init.templates import templates
from launching import REPOSITORY

NAMES = [
    "cluster", "gpu_nodes", "heterogeneous", "jump_host", "link_prediction", "local", "own_script", "server_client",
    "shared_folder", "two_cpu_nodes",
]  # fmt: skip
#: Shorter settings for templates that run on this machine.
RUN = {
    "local": "--set data.options.num_nodes=5000 --epochs 1",
    "heterogeneous": "--set data.options.num_nodes=3000 --epochs 1",
    "link_prediction": "--set data.options.num_nodes=3000 -- python {examples}/link_prediction.py "
    "--relation paper__cites__paper --fanouts 6,3 --epochs 1 --batch-size 256",
}


def test_list_has_one_line_per_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES == [one.name for one in templates()]
    assert all(re.search(r" {2,}\S+ \S+", line) and len(line) <= 120 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_loads_and_plans_in_another_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["init", "--template", name, "-o", "mine.yml"]) == 0
    assert "Wrote mine.yml" in capsys.readouterr().out
    assert main.run(["plan", "--config", "mine.yml"]) == 0
    text, config = (tmp_path / "mine.yml").read_text(), load_config(tmp_path / "mine.yml")
    assert f"{name}.yml" not in text.replace("mine.yml", "") and "../" not in text
    assert text.startswith("# ") and text.count("#") > 3
    if config.makes_parts:
        assert Path(config.data.folder).is_relative_to(tmp_path)
    assert all(Path(file).exists() for file in config.run.files)
    assert main.run(["init", "--template", name, "-o", "mine.yml"]) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_local_templates_run_in_another_folder(name: str, tmp_path: Path) -> None:
    def gnnfleet(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "launch.py"), *words],
            cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]

    gnnfleet("init", "--template", name, "-o", "mine.yml")
    gnnfleet("--config", "mine.yml", *RUN[name].format(examples=REPOSITORY / "examples").split())
