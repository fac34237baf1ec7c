"""Tests of ``gf.launch`` and ``gf.LaunchedRun``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import gnnfleet as gf
from launcher.config.loader import load_config
from launcher.manage import from_python
from waiting import wait_until

CONFIG = """
transport: local
nodes: 2
data: {dataset: synthetic, options: {num_nodes: 2000}}
train: {epochs: 2, hidden: 16}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "cluster.yml"
    path.write_text(f"{CONFIG}defaults: {{workdir: '{tmp_path}/node{{node_rank}}'}}\n")
    return path


def test_mistakes_are_exceptions(config: Path) -> None:
    (config.parent / "launcher.py").write_text("raise SystemExit('a file of the user ran')")
    with pytest.raises(gf.FleetError, match=r"--set train.lrr=1: unknown key `lrr` in train; did you mean `lr`\?"):
        gf.launch(config, set={"train.lrr": 1})
    with pytest.raises(
        gf.FleetError, match="^preflight refused the run:\n  node0 .*: cannot run /no/bin/python"
    ) as caught:
        gf.launch(config, set={"nodes.0.venv": "/no"}, quiet=True)
    assert not isinstance(caught.value, gf.RunFailed)
    with pytest.raises(gf.FleetError, match="no run toy is known on this machine"):
        gf.LaunchedRun("toy")


def test_values_of_any_library_and_script_are_set_as_they_are(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(from_python, "_gnnfleet", lambda words, **more: given.extend(words) or (1, "", "not launched"))
    values = {
        "name": "été 😀",
        "train.hidden": np.int64(8),
        "train.lr": np.float32(0.5),
        "data.digests": np.bool_(False),
    }
    values |= {"train.fanouts": np.array([2, 1]), "data.options.num_nodes": torch.tensor(70)}
    with pytest.raises(gf.FleetError, match="not launched"):
        gf.launch(config, set=values)
    read = load_config(config, [value for option, value in zip(given, given[1:], strict=False) if option == "--set"])
    assert (read.name, read.train.hidden, read.train.lr, read.data.digests) == ("été 😀", 8, 0.5, False)
    assert read.train.fanouts == (2, 1) and read.data.options == {"num_nodes": 70}


@pytest.mark.slow
def test_a_run_is_launched_watched_stopped_and_found_again(config: Path) -> None:
    run = gf.launch(config, set={"train.epochs": 5000, "name": "watched"}, quiet=True)
    assert run.state() == "running" and run.result is None and run.folder.parent.name == "runs"
    with pytest.raises(TimeoutError, match="it still runs after 2 s"):
        run.wait(timeout=2)
    rows = run.metrics
    assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1)) and "val_accuracy" in rows[0]
    gf.LaunchedRun(run.run_id).stop()  # as another program would
    with pytest.raises(gf.RunFailed, match="the run was stopped by") as caught:
        run.wait()
    assert caught.value.result["state"] == "stopped" and run.state() == "stopped"


@pytest.mark.slow
def test_a_run_waits_in_line_for_another(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))  # of no other test
    with tempfile.TemporaryDirectory(prefix="gf") as sockets:  # of a tmux server that has this environment
        monkeypatch.setenv("TMUX_TMPDIR", sockets)
        first = gf.launch(config, set={"train.epochs": 5000}, nodes=1, wait=True, quiet=True)
        second = gf.launch(config, set={"train.epochs": 1}, nodes="1-2", wait="1h", quiet=True)
        assert first.state() == "running" and second.state() == "waiting" and second.started
        first.stop()
        assert second.wait()["state"] == "done"


@pytest.mark.slow
def test_the_first_cause_of_a_failure_is_the_exception(config: Path, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': raise ValueError('no column')\ntime.sleep(60)\n")
    with pytest.raises(gf.RunFailed, match="^rank 1 on node1 .* raised ValueError: no column$"):
        gf.launch(config, command=[sys.executable, "own.py"], quiet=True)


@pytest.mark.slow
def test_a_run_goes_on_when_its_launcher_is_killed(config: Path) -> None:
    words = f"import gnnfleet as gf; gf.launch({str(config)!r}, run_id='killed', quiet=True)"
    launching = subprocess.Popen([sys.executable, "-c", words])

    def launcher() -> int | None:
        """Return the pid of the launcher once it has started processes of the run."""
        folder = config.parent / "runs" / "killed"
        if not (folder / "run.json").exists() or not gf.LaunchedRun(folder).started:
            return None
        return json.loads((folder / "launch.json").read_text())["pid"]

    os.kill(wait_until(launcher), signal.SIGKILL)
    assert launching.wait(60) == 0
    assert gf.LaunchedRun("killed").wait()["metrics"]["epochs"] == 2
