"""Tests of ``gnnfleet clean``: what it deletes on the hosts, what stays, and what it says before."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.errors import UnreachableError, UsageError
from launcher.manage.clean import CleanOptions, Item, chosen, seconds_of
from launcher.node.procs import look
from launcher.transport.local import LocalTransport

DAY = 86400
OLD, NEW = "0" * 16, "1" * 16


def age(folder: Path, days: float) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (time.time() - days * DAY,) * 2, follow_symlinks=False)


def put(path: Path, text: str = "x" * 10_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work folder with two old runs, one of which is alive, and what they use; node 1 has nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "hosts/node0"
    me = look(os.getpid())
    assert me is not None
    for name, code, data in (("dead", OLD, "toy"), ("live", NEW, "big"), ("over", OLD, "toy")):
        node = work / f"runs/{name}/node0"
        put(node / "run.json", "{}")
        put(node / "node.json", json.dumps({"argv": [f"/elsewhere/node0/code/{code}/x.py", f"{work}/data/{data}"]}))
        state = {"pid": me.pid, "start_ticks": me.start_ticks if name == "live" else 1}
        put(node / "state.json", json.dumps(state))
    put(work / "runs/over/node0/result.json", "{}")
    for name in (f"code/{OLD}/a.py", f"code/{NEW}/a.py", "data/toy/manifest.json", "data/big/manifest.json"):
        put(work / name)
    for name in ("code/mine/a.py", "data/mine/a.csv", "runs/mine/notes.txt", "elsewhere/a"):
        put(work / name)
    put(tmp_path / "kept/manifest.json")
    (work / "data/link").symlink_to(tmp_path / "kept")
    put(tmp_path / "cache/gnnfleet/kernels/k.nbc")
    age(tmp_path, 30)
    put(
        tmp_path / "c.yml",
        f"nodes: 2\ntransport: local\ndefaults: {{workdir: '{tmp_path}/hosts/node{{node_rank}}'}}\n"
        "data: {dataset: synthetic}\n",
    )
    return work


def left(work: Path) -> set[str]:
    return {str(path.relative_to(work)) for path in work.glob("*/*")}


FOREIGN = {"code/mine", "data/mine", "runs/mine", "elsewhere/a", "data/link"}


def test_old_folders_go_and_what_a_live_run_uses_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(home)
    assert run(["clean", "--config", "c.yml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for name in ("runs/dead", "runs/over", f"code/{OLD}", "data/toy"):
        assert f"{home}/{name}\n" in shown
    assert "nothing was deleted; 4 folders of" in shown and "stay: in use" in shown and left(home) == before
    assert run(["clean", "--config", "c.yml"]) == 2, "there is no terminal to ask at"
    assert "give --dry-run or --yes" in capsys.readouterr().err and left(home) == before
    assert run(["clean", "--config", "c.yml", "--yes"]) == 0
    assert left(home) == {"runs/live", f"code/{NEW}", "data/big", *FOREIGN}
    assert (home.parents[1] / "kept/manifest.json").exists() and (home.parents[1] / "cache/gnnfleet/kernels").exists()
    assert "freed" in capsys.readouterr().out
    assert run(["clean", "--config", "c.yml", "--yes"]) == 0 and "nothing to delete" in capsys.readouterr().out


def test_kinds_age_and_number_limit_what_is_deleted(home: Path) -> None:
    age(home / "runs/over", 8)
    before = left(home)
    assert run(["clean", "--config", "c.yml", "--yes", "--older-than", "31d"]) == 0 and left(home) == before
    assert run(["clean", "runs", "--config", "c.yml", "--yes", "--keep", "2"]) == 0
    assert before - left(home) == {"runs/dead"}, "the live run and the newer one are the two newest"
    assert run(["clean", "parts", "--config", "c.yml", "--yes", "--older-than", "2w"]) == 0
    assert before - left(home) == {"runs/dead"}, "the run of 8 days ago used the parts"
    assert run(["clean", "code", "parts", "--config", "c.yml", "--yes", "--older-than", "0"]) == 0
    assert before - left(home) == {"runs/dead", f"code/{OLD}", "data/toy"}


def test_kernels_of_containers_are_in_the_work_folder(home: Path) -> None:
    shutil.rmtree(home / "runs/live")  # any live run may use kernels
    put(home / "kernels/x.nbc")
    put(home.parent / "node1/kernels/mine.txt")
    age(home.parent, 30)
    assert run(["clean", "kernels", "--config", "c.yml", "--yes"]) == 0
    assert not (home / "kernels").exists() and (home.parent / "node1/kernels/mine.txt").exists()


def test_a_run_that_is_being_started_or_was_heard_of_lately_is_alive(home: Path) -> None:
    os.utime(home / "runs/dead/node0/state.json")  # as by its supervisor on another host with this folder
    (home / "runs/over/node0/result.json").unlink()
    os.utime(home / "runs/over/node0/node.json")
    before = left(home)
    assert run(["clean", "--config", "c.yml", "--yes", "--older-than", "0"]) == 0 and left(home) == before


def test_a_host_that_cannot_be_reached_is_reported_and_the_others_are_cleaned(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Path("c.yml"), f"nodes: [a, b]\ndefaults: {{workdir: {home}}}\ndata: {{dataset: synthetic}}\n")
    lost = UnreachableError("no route to host", host="b", node_rank=1)
    monkeypatch.setattr("launcher.manage.clean.connect_all", lambda config: {0: LocalTransport(0), 1: lost})
    assert run(["clean", "--config", "c.yml", "--yes"]) == 1
    shown = capsys.readouterr().out
    assert "b: no route to host" in shown and "freed" in shown and "runs/dead" not in left(home)


def test_durations() -> None:
    assert [seconds_of(text) for text in ("7d", "12h", "30m", "2w", "0")] == [7 * DAY, DAY / 2, 1800, 14 * DAY, 0]
    for text in ("7", "d", "-1d", "1.d", ""):
        with pytest.raises(UsageError, match="such as 7d"):
            seconds_of(text)


def test_the_newest_of_each_kind_are_kept() -> None:
    items = [Item(kind, f"/{kind}{k}", 1, k * DAY, "") for kind in ("runs", "code") for k in range(10)]
    found = chosen(items, CleanOptions(("runs",), older_than=0, keep=8))
    assert [item.path for item in found] == ["/runs8", "/runs9"]
