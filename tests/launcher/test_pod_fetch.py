"""Tests of the init container that fetches the parts of a pod (``launcher.node.pods.fetch_in_pod``)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.node.pods import fetch_in_pod
from launcher.node.pods.exported_run import FORMAT, VERSION, ExportedNode, TooLate
from launcher.node.remote_folder import RemoteFolder, StoreError
from launcher.node.store.part_files import OtherParts, stored_files
from launcher.plan.partition import PartitionFiles
from store_kit import X0, FaultyStore, flip_byte, note_of, parts_in, visible_files
from waiting import stretched


class Exported:
    """The ConfigMap of a run with two nodes, whose node 1 fetches part 1 from a folder of this machine."""

    def __init__(self, folder: Path, wait: float = 20.0) -> None:
        self.parts = parts_in(folder / "store")
        self.folder, self.config, self.run_dir = folder, folder / "config", folder / "runs/toy/node1"
        self.config.mkdir()
        run_dirs = [str(folder / f"runs/toy/node{k}") for k in range(2)]
        export = {"format": FORMAT, "version": VERSION, "lead": 0, "wait": wait, "run_dirs": run_dirs}
        (self.config / "export.json").write_text(json.dumps(export))
        self.write()

    def write(self, **more: Any) -> None:
        fetch = {"url": f"file://{self.folder}/store", "options": {}, "folder": str(self.folder / "pod/toy")}
        fetch |= {"parts": [1], "replicated": False, "manifest": "", "limit": None} | more
        (self.config / "node1.json").write_text(json.dumps({"env": {"GNNFLEET_TEST_REGION": "north"}, "fetch": fetch}))

    def node(self, k: int = 1) -> ExportedNode:
        return ExportedNode(str(self.config), {"GNNFLEET_FIRST_NODE": "0", "JOB_COMPLETION_INDEX": str(k)})

    def fetch(self, monkeypatch: pytest.MonkeyPatch) -> int:
        for name, text in {"GNNFLEET_FIRST_NODE": "1", "JOB_COMPLETION_INDEX": "0"}.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setattr("sys.argv", ["fetch_in_pod.py", str(self.config)])
        return fetch_in_pod.main()


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exported:
    monkeypatch.setenv("GNNFLEET_TEST_REGION", "")  # is deleted after the test
    monkeypatch.delenv("GNNFLEET_TEST_REGION")
    return Exported(tmp_path)


def test_a_pod_gets_the_files_of_its_node(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported.write(manifest=exported.parts.files[-1].sha256)
    assert exported.fetch(monkeypatch) == 0
    fetched = exported.folder / "pod/toy"
    assert visible_files(fetched) == {file.path for file in exported.parts.of_parts([1])}
    total = sum((fetched / path).stat().st_size for path in visible_files(fetched))
    assert json.loads((exported.run_dir / "fetched.json").read_text())["bytes"] == total
    assert note_of(fetched)["runs"][0]["run_dir"] == str(exported.run_dir)
    assert f"from file://{exported.folder}/store; 0 B are here" in capsys.readouterr().out
    exported.write(replicated=True)
    assert exported.fetch(monkeypatch) == 0
    assert visible_files(fetched) == {file.path for file in exported.parts.of_parts([1], replicated=True)}


def test_the_environment_of_the_node_is_set_for_the_store(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exported.fetch(monkeypatch) == 0
    assert fetch_in_pod.os.environ["GNNFLEET_TEST_REGION"] == "north"


@pytest.mark.parametrize(
    ("damage", "status", "message"),
    [
        ("no manifest", 2, "store has no parts, as it has no manifest.json; upload them: gnnfleet partition push"),
        ("other parts", 2, "has other parts than those that the run was exported for (manifest.json "),
        ("damaged", 2, "manifest.json: not a usable partition manifest"),
        ("no part", 2, "store has no part7; partition the graph into more parts, or export again"),
        ("path", 2, "manifest.json: not a usable partition manifest (damaged entry of 'part0/../../x')"),
        ("wrong byte", 1, f"store/{X0.replace('part0', 'part1')}: digest "),
    ],
)
def test_parts_that_cannot_be_used(
    damage: str,
    status: int,
    message: str,
    exported: Exported,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    manifest = exported.folder / "store/manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "damaged":
        manifest.write_text('{"files": [{}]}')
    elif damage == "path":
        file = {"path": "part0/../../x", "bytes": 1, "sha256": "0" * 64}
        manifest.write_text(json.dumps({"files": [file]}))
    elif damage == "wrong byte":
        flip_byte(exported.folder / "store" / X0.replace("part0", "part1"))
    else:
        exported.write(**{"parts": [7]} if damage == "no part" else {"manifest": "f" * 64})
    assert exported.fetch(monkeypatch) == status
    assert message in capsys.readouterr().err
    assert not (exported.folder / "pod/toy/manifest.json").exists()


def test_an_unreachable_store_is_tried_again(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FaultyStore(exported.folder / "store", cuts=2)
    monkeypatch.setattr(fetch_in_pod, "RemoteFolder", lambda url, options: store)
    monkeypatch.setattr(fetch_in_pod, "_PAUSE", 0.01)
    assert exported.fetch(monkeypatch) == 0
    assert capsys.readouterr().out.count("cannot be read (ConnectionError); trying again") == 2


def test_a_node_without_parts_fetches_nothing(exported: Exported) -> None:
    (exported.config / "node0.json").write_text(json.dumps({"env": {}, "fetch": None}))
    fetch_in_pod.fetch_for(exported.node(0))
    assert not (exported.folder / "pod").exists()


def test_waiting_goes_on_while_another_pod_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.node.pods.exported_run.POLL", 0.02)
    monkeypatch.setattr("launcher.node.pods.exported_run._LOOK_EVERY", 0.05)
    exported = Exported(tmp_path, wait=0.4)
    node, counts, begun = exported.node(0), iter(range(10)), time.monotonic()
    exported.run_dir.mkdir(parents=True)

    def fetched_something() -> bool:
        (exported.run_dir / "fetched.json").write_text(json.dumps({"bytes": next(counts, 10)}))
        time.sleep(0.1)
        return False

    with pytest.raises(TooLate, match=r"waited 0.4 s for node1"):
        node.wait(fetched_something, "for node1")
    assert 1.0 < time.monotonic() - begun < stretched(10)
    assert node.alive()


def test_all_files_of_a_partition_are_chosen_as_by_a_launch(tmp_path: Path) -> None:
    parts: PartitionFiles = parts_in(tmp_path / "parts")
    store = RemoteFolder(f"file://{tmp_path}/parts", {})
    for ids, replicated in (([0], False), ([0, 1], False), ([1], True)):
        chosen = [file.path for file in stored_files(store, ids, replicated=replicated)]
        assert chosen == [file.path for file in parts.of_parts(ids, replicated=replicated)]
    with pytest.raises(OtherParts) as error:
        stored_files(store, [0, 9], replicated=False)
    assert isinstance(error.value, StoreError)
