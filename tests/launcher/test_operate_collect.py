"""Tests of collecting files from nodes: small files in one call, large files one by one, unchanged files not at all."""

from __future__ import annotations

import base64
import dataclasses
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from fake_transport import FakeTransport
from launcher.errors import UnreachableError
from launcher.node.programs import collect_files
from launcher.report.metrics import metrics_files, read_metrics
from launcher.report.report import RunReport
from launcher.sync import collect as collecting
from launcher.sync.collect import _WANTED as WANTED
from launcher.transport.base import OnBytes
from launcher.transport.local import LocalTransport
from run_kit import make_launch, make_node
from trainer.core.train_config import TrainConfig


class Counting(LocalTransport):
    def __init__(self) -> None:
        super().__init__()
        self.downloads: list[str] = []
        self.commands = 0

    def run(self, *args, **more):
        self.commands += 1
        return super().run(*args, **more)

    def talk(self, *args, **more):
        self.commands += 1
        return super().talk(*args, **more)

    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        self.downloads.append(source)
        super().download(source, dest, most=most, on_bytes=on_bytes)


def collect(plan: Any, transports: Any, folder: Path) -> RunReport:
    report = RunReport(plan.run_id, folder)
    collecting.collect(report, plan, transports)
    return report


@pytest.fixture
def plan(tmp_path: Path):
    made = make_launch([make_node(tmp_path, k, []) for k in range(2)])
    for node in made.nodes:
        top = Path(node.run_dir)
        for name, text in {
            f"logs/rank{node.node_rank}.log": f"2026-11-20T21:00:00.000Z hello of {node.node_rank}\n",
            f"metrics-rank{node.node_rank}.jsonl": '{"t": 1.0, "kind": "result", "test_accuracy": 0.5}\n',
            f"outcomes/rank{node.node_rank}.json": f'{{"name": "rank{node.node_rank}", "node_rank": 1}}',
            f"track/tensorboard/events.{node.node_rank}": "scalars",
            "result.json": '{"state": "done"}',
            "node.json": '{"token": "secret"}',
            "service.key": "secret",
        }.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(text)
    first = Path(made.nodes[0].run_dir)
    (first / "output/deep").mkdir(parents=True)
    for k in range(300):
        (first / f"output/deep/{k}.txt").write_text(str(k))
    (first / "checkpoints").mkdir()
    (first / "checkpoints/last.pt").write_bytes(os.urandom(3 << 20))
    return made


def test_small_files_come_in_one_call_per_node_and_large_ones_alone(plan, tmp_path) -> None:
    lines, here = [Counting(), Counting()], tmp_path / "here"
    collected = collect(plan, dict(enumerate(lines)), here)
    assert collected.notes == []
    assert [line.commands for line in lines] == [1, 1]
    assert lines[0].downloads == [f"{plan.nodes[0].run_dir}/checkpoints/last.pt"] and lines[1].downloads == []
    assert (here / "logs/node1/rank1.log").read_text().endswith("hello of 1\n")
    assert (here / "output/node0/deep/299.txt").read_text() == "299"
    assert (here / "track/tensorboard/events.1").read_text() == "scalars"
    assert read_metrics(metrics_files(here)).result["test_accuracy"] == 0.5
    assert [record["name"] for record in collected.records[1]] == ["rank1"]
    assert "secret" not in "".join(path.read_text() for path in here.rglob("*.*") if path.suffix != ".pt")


def test_collecting_again_fetches_only_changed_files(plan, tmp_path) -> None:
    here = tmp_path / "here"
    collect(plan, {0: LocalTransport(), 1: LocalTransport()}, here)
    log = Path(plan.nodes[1].run_dir) / "logs/rank1.log"
    log.write_text(log.read_text() + "more\n")
    before = {path: path.stat().st_ino for path in here.rglob("*") if path.is_file()}
    line = Counting()
    collect(plan, {0: line, 1: LocalTransport()}, here)
    after = {path: path.stat().st_ino for path in here.rglob("*") if path.is_file()}
    assert line.downloads == []
    assert [path.name for path in before if before[path] != after[path]] == ["rank1.log"]
    assert (here / "logs/node1/rank1.log").read_text().endswith("more\n")


def test_checkpoints_of_the_best_epochs_come_with_keep_and_go_with_those_of_the_node(plan, tmp_path) -> None:
    here, there = tmp_path / "here/checkpoints", Path(plan.nodes[0].run_dir) / "checkpoints"
    names = ["epoch-0001.pt", "epoch-0002.pt", "epoch-0002-step-000003.pt"]
    for name in names:
        (there / name).write_text("state")
    transports = {0: LocalTransport(), 1: LocalTransport()}
    collect(plan, transports, tmp_path / "here")
    assert [path.name for path in here.iterdir()] == ["last.pt"]
    plan = dataclasses.replace(plan, train=TrainConfig(keep=2))
    for kept in (names[:2], names[1:2]):
        collect(plan, transports, tmp_path / "here")
        assert {path.name for path in here.iterdir()} == {"last.pt", *kept}
        (there / names[0]).unlink(missing_ok=True)


def test_an_unreachable_node_is_noted_and_the_others_are_collected(plan, tmp_path) -> None:
    lost = UnreachableError("no answer", host="gnn2", node_rank=1)
    collected = collect(plan, {0: LocalTransport(), 1: lost}, tmp_path / "here")
    (note,) = collected.notes
    assert note == (
        "node1 (local): its files could not be fetched (no answer); they are still on the node, in "
        + plan.nodes[1].run_dir
    )
    assert (tmp_path / "here/logs/node0/rank0.log").exists()


def packed(content: bytes, size: int | None = None) -> dict[str, object]:
    data = base64.b64encode(zlib.compress(content)).decode()
    return {"bytes": len(content) if size is None else size, "mtime_ns": 0, "data": data}


def test_a_node_cannot_write_outside_its_folder_or_more_than_announced(plan, tmp_path) -> None:
    here, outside = tmp_path / "top/here", tmp_path / "outside"
    (here / "output").mkdir(parents=True)
    (here / "output/node0").symlink_to(outside)
    outside.mkdir()
    files = {
        f"{tmp_path}/absolute": packed(b"x"),
        "output/../../../../escaped": packed(b"x"),
        "output/x": packed(b"through a link"),
        "logs/rank0.log\0.log": packed(b"x"),
        "service.key": packed(b"x"),
        "logs/bomb.log": packed(bytes(200 << 20), 10),
        "logs/short.log": {**packed(os.urandom(100)), "data": str(packed(os.urandom(100))["data"])[:40]},
        "logs/good.log": packed(b"as announced"),
        "checkpoints/last.pt": {"bytes": 1000, "mtime_ns": 0, "data": None},
    }
    node, first = FakeTransport(), plan.nodes[0]
    node.files[f"{first.run_dir}/checkpoints/last.pt"] = bytes(1 << 20)
    node.on_program("collect_files", lambda request: {"files": files, "errors": {}})
    tracemalloc.start()
    collected = collect(make_launch([first]), {0: node}, here)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    assert {path.name for path in (tmp_path / "top").rglob("*") if path.is_file()} == {"good.log", "last.pt"}
    assert (here / "checkpoints/last.pt").stat().st_size == 1000
    assert not any(outside.iterdir()) and not (tmp_path / "escaped").exists() and not (tmp_path / "absolute").exists()
    assert len(collected.notes) == 7, collected.notes


def test_a_file_whose_name_does_not_fit_does_not_stop_the_others(plan, tmp_path) -> None:
    node, first = FakeTransport(), plan.nodes[0]
    top = tmp_path / "on-node"
    names = ["a" * 255, "b\nc", os.fsdecode(b"caf\xe9"), "d \x1b[31m", "z.txt"]
    for name in names:
        (top / "output").mkdir(parents=True, exist_ok=True)
        (top / "output" / name).write_text("kept")
    answer = collect_files.main({"path": str(top), "wanted": WANTED, "have": {}, "small": 1 << 20, "room": 1 << 20})
    answer["files"]["output/" + "y" * 256] = answer["files"]["output/z.txt/below"] = packed(b"x")
    answer["files"]["output/\udce9large"] = {"bytes": 5, "mtime_ns": 0, "data": None}
    answer["files"]["output/zz.txt"] = packed(b"last")
    node.on_program("collect_files", lambda request: answer)
    collected = collect(make_launch([first]), {0: node}, tmp_path / "here")
    found = {path.name for path in (tmp_path / "here/output/node0").iterdir()}
    assert found == {"a" * 255, names[2], "z.txt", "zz.txt"}
    assert len(collected.notes) == 5, collected.notes
    assert all(note.isprintable() for note in collected.notes), collected.notes


@pytest.mark.parametrize("answer", [[], {"files": []}, {"files": {"a": 1}, "errors": {}}, {"files": {}, "errors": [1]}])
def test_a_malformed_answer_fails_that_node_only(plan, tmp_path, answer) -> None:
    node = FakeTransport().on_program("collect_files", lambda request: answer)
    (note,) = collect(make_launch([plan.nodes[0]]), {0: node}, tmp_path / "here").notes
    assert "its files could not be fetched" in note and "expected a list of files" in note
