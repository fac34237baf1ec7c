"""Tests of ``data.store_limit``: which fetched partition folders are deleted, and which a run protects."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from launcher.node.programs.machine import read
from launcher.node.remote_folder import StoreError
from launcher.node.store.parts_cache import NOTE, claim
from store_kit import note_of

SIZE = 100_000


def fetched(top: Path, name: str, used: float, run_dir: Path | None = None, size: int = SIZE, **run: object) -> Path:
    """Create a fetched folder of ``size`` bytes, last used at ``used``. ``run_dir``: folder of a run that uses it."""
    folder = top / name
    folder.mkdir(parents=True)
    (folder / "x.npy").write_bytes(bytes(size))
    boot = read("/proc/sys/kernel/random/boot_id").strip()
    mine = {"run_dir": str(run_dir), "host": socket.gethostname(), "boot_id": boot, "since": used, **run}
    (folder / NOTE).write_text(json.dumps({"url": "file:///s", "used": used, "runs": [mine] if run_dir else []}))
    return folder


def running(folder: Path) -> Path:
    """Create the folder of a run whose supervisor is this process."""
    folder.mkdir(parents=True)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    (folder / "state.json").write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks}))
    return folder


def need(top: Path, size: int, limit: int | None, run: str = "new") -> list[str]:
    (top.parent / f"runs/{run}/node0").mkdir(parents=True, exist_ok=True)
    return claim(str(top / "f-new"), "file:///s", str(top.parent / f"runs/{run}/node0"), size, limit)


def test_the_least_recently_used_folders_go_first(tmp_path: Path) -> None:
    top = tmp_path / "data"
    for name, used in (("f-old", 10), ("f-older", 5), ("f-newer", 20)):
        fetched(top, name, used)
    (top / "f-sent").mkdir()
    (top / "f-sent/x.npy").write_bytes(bytes(SIZE))
    assert need(top, SIZE, None) == []
    assert need(top, SIZE, int(2.5 * SIZE)) == ["f-older", "f-old"]
    assert sorted(path.name for path in top.iterdir() if path.is_dir()) == ["f-new", "f-newer", "f-sent"]
    assert [run["run_dir"] for run in note_of(top / "f-new")["runs"]] == [str(tmp_path / "runs/new/node0")]


def test_folders_of_running_runs_stay(tmp_path: Path) -> None:
    top, run_dir = tmp_path / "data", running(tmp_path / "runs/live/node0")
    fetched(top, "f-live", 5, run_dir)
    fetched(top, "f-free", 10)
    assert need(top, SIZE, int(2.5 * SIZE)) == ["f-free"]
    with pytest.raises(
        StoreError, match=r"store_limit is 150 kB, but this run needs 100 kB and 1\d\d kB are in use by live"
    ):
        need(top, SIZE, int(1.5 * SIZE))
    assert (top / "f-live/x.npy").exists()
    (run_dir / "result.json").write_text("{}")
    assert need(top, SIZE, int(1.5 * SIZE)) == ["f-live"]


def test_a_run_larger_than_the_limit_deletes_nothing(tmp_path: Path) -> None:
    top = tmp_path / "data"
    fetched(top, "f-old", 5)
    with pytest.raises(StoreError, match="store_limit is 50 kB, but this run needs 100 kB; raise the limit$"):
        need(top, SIZE, SIZE // 2)
    assert (top / "f-old/x.npy").exists() and not (top / "f-new" / NOTE).exists()


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"boot_id": "before the last boot"}, False),
        ({"host": "another", "since": 5.0}, False),
        ({"host": "another", "since": 9e9}, True),
        ({"since": 9e9}, True),
        ({"since": 5.0}, False),
    ],
)
def test_claims_without_a_supervisor(tmp_path: Path, change: dict[str, object], kept: bool) -> None:
    # A run that is being launched counts for an hour, one of another host for two weeks, and none from before a boot.
    top, run_dir = tmp_path / "data", tmp_path / "runs/begun/node0"
    run_dir.mkdir(parents=True)
    fetched(top, "f-begun", 5, run_dir, **{"since": 9e9, **change})
    if kept:
        with pytest.raises(StoreError, match="in use by begun"):
            need(top, SIZE, SIZE)
    else:
        assert need(top, SIZE, SIZE) == ["f-begun"]


def test_a_second_claim_of_a_run_replaces_its_first_and_a_damaged_note_counts_as_unused(tmp_path: Path) -> None:
    top = tmp_path / "data"
    need(top, SIZE, None)
    need(top, SIZE, None)
    assert len(note_of(top / "f-new")["runs"]) == 1
    fetched(top, "f-bad", 5)
    (top / "f-bad" / NOTE).write_text('{"runs": 3')
    assert need(top, SIZE, SIZE) == ["f-bad"]
