"""Tests of the program that runs one node of an exported run in a pod (``launcher.node.pods.pod``)."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.node.pods import pod
from launcher.node.pods.exported_run import (
    CODE,
    CODE_FOLDER,
    FORMAT,
    PYTHON,
    TOKEN,
    VERSION,
    TooLate,
    Unusable,
    run_program,
)
from launcher.node.pods.pod import Pod


class Mounts:
    """The folders of a pod's ConfigMap, Secret and volume, for a run with two nodes; node 0 is the lead node."""

    def __init__(self, folder: Path) -> None:
        self.run, self.secrets, self.volume = (folder / name for name in ("run", "secrets", "volume"))
        for path in (self.run, self.secrets, self.volume / "parts"):
            path.mkdir(parents=True)
        self.run_dirs = [str(self.volume / f"node{k}") for k in range(2)]
        self.export: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "gnnfleet": "9.9",
            "lead": 0,
            "wait": 0.6,
            "encrypted": True,
            "addresses": ["localhost", "localhost"],
            "run_dirs": self.run_dirs,
            "data_dirs": [str(self.volume / "parts")] * 2,
            "files": [{"key": "file0", "path": "tools/run.sh", "mode": 0o755}],
        }
        self.write()
        trainer = {
            "argv": [PYTHON, f"{CODE}/x.py"],
            "env": {"GNNFLEET_TOKEN": TOKEN},
            "cwd": "",
        }
        node = {
            "env": {"PYTHONPATH": CODE},
            "spec": {
                "token": TOKEN,
                "nodes": [{"label": "node0"}, {"label": "node1", "ranks": [1]}],
                "trainer": trainer,
            },
        }
        (self.run / "node1.json").write_text(json.dumps(node))
        for name, text in {"cluster.json": "{}", "run.json": "{}", "file0": "echo hi\n"}.items():
            (self.run / name).write_text(text)
        for name in ("token", "service.key"):
            (self.secrets / name).write_text(f"{name}-secret\n")

    def write(self, **more: Any) -> None:
        (self.run / "export.json").write_text(json.dumps({**self.export, **more}))

    def pod(self, k: int = 1) -> Pod:
        return Pod(str(self.run), {"GNNFLEET_FIRST_NODE": "0", "JOB_COMPLETION_INDEX": str(k)})


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    return Mounts(tmp_path)


def status(mounts: Mounts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the program; return its exit status and its error message."""
    monkeypatch.setattr("sys.argv", ["pod.py", str(mounts.run), str(mounts.secrets)])
    return pod.main(), capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    "damage, message",
    {
        "no export": "export.json does not exist; mount the ConfigMap of the run",
        "broken": "export.json cannot be read",
        "version": "was written by gnnfleet 9.9, which this image cannot read",
        "index": "JOB_COMPLETION_INDEX is not a number; run this program in a pod of the exported Indexed Job",
        "too many": "this pod would be node2, but the run has 2 nodes",
        "no secret": "token: No such file or directory; apply the Secret of the run",
        "no node": "node1.json: No such file or directory; export the run again",
    }.items(),
)
def test_a_run_that_cannot_work_ends_with_status_2(
    damage: str, message: str, mounts: Mounts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (mounts.volume / "parts/manifest.json").write_text("{}")
    mounts.pod(0).begin_attempt()
    monkeypatch.setenv("GNNFLEET_FIRST_NODE", "1" if damage != "too many" else "2")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0" if damage != "index" else "one")
    if damage in ("no export", "no node", "no secret"):
        gone = {"no export": "run/export.json", "no node": "run/node1.json", "no secret": "secrets/token"}
        (mounts.run.parent / gone[damage]).unlink()
    elif damage == "broken":
        (mounts.run / "export.json").write_text("{")
    elif damage == "version":
        mounts.write(version=99)
    code, printed = status(mounts, monkeypatch, capsys)
    assert code == 2
    assert message in printed


def test_an_error_without_a_file_name_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert run_program(full) == 1
    assert capsys.readouterr().err == "error: No space left on device\n"


def test_missing_parts_and_names_are_waited_for(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GNNFLEET_FIRST_NODE", "1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    code, printed = status(mounts, monkeypatch, capsys)
    assert code == 1
    assert f"waited 0.6 s for the parts: there is no {mounts.volume}/parts/manifest.json" in printed
    mounts.write(addresses=["localhost", "nobody.invalid"])
    with pytest.raises(TooLate, match="for node1: nobody.invalid has no address"):
        mounts.pod(0).await_names()


def test_a_node_joins_a_later_attempt_of_the_lead_node(mounts: Mounts) -> None:
    with pytest.raises(TooLate, match="for node0: it has not begun attempt 0"):
        mounts.pod(1).begin_attempt()
    assert [mounts.pod(0).begin_attempt(), mounts.pod(1).begin_attempt()] == [0, 0]
    own = Path(mounts.run_dirs[1])
    for name in ("state.json", "result.json", "server.ready", "metrics-rank1.jsonl"):
        (own / name).write_text("{}")
    mounts.write(wait=20)
    joined: list[int] = []
    thread = threading.Thread(target=lambda: joined.append(mounts.pod(1).begin_attempt()))
    thread.start()
    time.sleep(0.7)
    assert joined == []  # the lead node is still in attempt 0
    assert mounts.pod(0).begin_attempt() == 1
    thread.join(20)
    assert joined == [1]
    left = {"attempt.json", "attempts", "logs", "metrics-rank1.jsonl", "outcomes", "procs", "waiting.json"}
    assert {path.name for path in own.iterdir()} == left
    assert (own / "attempts/0/server.ready").exists()


def test_files_of_a_node(mounts: Mounts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "cpus", lambda: 6)
    mounts.pod(0).begin_attempt()
    node = mounts.pod(1)
    node.begin_attempt()
    content = b"weights"
    checkpoint = content + b"\0\0" + b"sha256:" + hashlib.sha256(content).hexdigest().encode()
    (Path(mounts.run_dirs[0]) / "checkpoints").mkdir()
    (Path(mounts.run_dirs[0]) / "checkpoints/epoch-0002.pt").write_bytes(checkpoint)
    tokens = []
    for attempt in (0, 1):
        assert node.write_files(str(mounts.secrets), attempt) == {"PYTHONPATH": CODE_FOLDER}
        spec = json.loads((Path(node.run_dir) / "node.json").read_text())
        env = spec["trainer"]["env"]
        assert env["OMP_NUM_THREADS"] == "6"
        assert env.get("GNNFLEET_RESUME", "").endswith("node0/checkpoints/epoch-0002.pt") == bool(attempt)
        assert env["GNNFLEET_TOKEN"] == spec["token"]
        assert (Path(spec["trainer"]["argv"][1]).parent / "launcher/node/pods/pod.py").exists()
        tokens.append(spec["token"])
    assert len({*tokens, "token-secret"}) == 3  # a supervisor of another attempt is not admitted
    assert (Path(node.run_dir) / "service.key").read_text() == "service.key-secret"
    private = [Path(node.run_dir) / name for name in ("node.json", "service.key", "run.json")]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600] * 3
    own = Path(node.run_dir) / "files/tools/run.sh"
    assert (own.read_text(), own.stat().st_mode & 0o777) == ("echo hi\n", 0o755)


def test_liveness(mounts: Mounts, monkeypatch: pytest.MonkeyPatch) -> None:
    node = mounts.pod(0)
    assert not node.alive()
    Path(node.run_dir).mkdir()
    for age, alive in {1: True, 100: False}.items():
        (Path(node.run_dir) / "state.json").write_text(json.dumps({"time": time.time() - age}))
        assert node.alive() == alive


def test_numbers_of_pods(mounts: Mounts) -> None:
    later = Pod(str(mounts.run), {"GNNFLEET_FIRST_NODE": "1", "JOB_COMPLETION_INDEX": "0"})
    assert (later.node_rank, later.leads, mounts.pod(0).leads) == (1, False, True)
    with pytest.raises(Unusable):
        Pod(str(mounts.run), {"GNNFLEET_FIRST_NODE": "1"})
