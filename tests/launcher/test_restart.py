"""Tests of whether a run starts again, and with which nodes, parts, ranks and checkpoint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.node.child_process import Loop
from launcher.node.environment import process_environment, rank_environments
from launcher.node.peers.hub import KILLED, Hub
from launcher.node.peers.link import MAX_LINE
from launcher.node.peers.model import Peers, make_cause
from launcher.node.spec import NodeSpec, RunNode
from launcher.node.supervisor.attempt import archive, cluster_file, newest_checkpoint, next_spec, parts_on_disk
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.rendezvous import Restarts, _Rendezvous
from launcher.node.supervisor.restart import AttemptEnd, Standing, decide, record, words

SILENT = "no sign of life for 6 s (run.peer_timeout); its machine or its network is down"
NODES = tuple(
    RunNode(f"node{k} ({'abc'[k]})", "worker", ranks, (k,), f"10.0.0.{k}", f"10.0.0.{k}", 100 + k, 200 + k)
    for k, ranks in enumerate(((0,), (1, 2), (3,)))
)
SPEC = NodeSpec(
    run_id="r1",
    token="t",
    node_rank=0,
    run_dir="/w/node0",
    nodes=NODES,
    server={"argv": ["python", "serve", "--own", "0", "--bind", "x"]},
    trainer={"argv": ["train"], "env": {"WORLD_SIZE": "4"}},
    start_timeout=60.0,
    grace=1.0,
    master_addr="gnn0",
    restarts=3,
)


def changed(spec: NodeSpec, **columns: tuple[Any, ...]) -> NodeSpec:
    """Return ``spec`` with other nodes: ``columns`` has the values of a field for all nodes."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return replace(spec, nodes=tuple(replace(node, **row) for node, row in zip(spec.nodes, rows, strict=True)))


def standing(epoch: int = -1, step: int = 0, parts: tuple[int, ...] = (), stepped: bool = True) -> Standing:
    checkpoint = {"file": f"e{epoch}.pt", "epoch": epoch, "step": step} if epoch >= 0 else None
    return Standing(checkpoint, parts, stepped)


def killed(rank: int = 1) -> dict[str, Any]:
    return make_cause(1, f"rank{rank}", "failure", "was killed by signal 9 (SIGKILL)", 1000.0)


def decided(standings: Mapping[int, Standing], spec: NodeSpec = SPEC, **more: Any) -> dict[str, Any]:
    return decide(AttemptEnd(spec, SPEC, standings, more.pop("cause", killed()), more.pop("lost", {}), **more), 1007.31)


ALL = {k: standing(2, 120, (k,)) for k in range(3)}
SHARED = {k: standing(2, 120, (0, 1, 2)) for k in range(3)}


def without(k: int, standings: Mapping[int, Standing] = SHARED) -> dict[int, Standing]:
    return {j: one for j, one in standings.items() if j != k}


def test_a_killed_rank_restarts_all_nodes_from_the_newest_checkpoint() -> None:
    found = decided({**ALL, 1: standing(2, 140, (1,))})
    assert found["restart"] and found["generation"] == 1 and found["nodes"] == [0, 1, 2]
    assert found["first"] == 1 and found["ranks"] == {"1": [0, 1], "0": [2], "2": [3]}
    assert found["checkpoint"] == {"file": "e2.pt", "epoch": 2, "step": 140}
    assert found["parts"] == {"0": [0], "1": [1], "2": [2]} and found["seconds"] == 7.3
    text = (
        "restart 1 of 3: rank 1 on node1 (b) was killed by signal 9 (SIGKILL); going on with 3 of 3 nodes from epoch 3"
    )
    assert words(found, SPEC) == f"{text}, step 140 (7.3 s)"


def test_without_a_checkpoint_it_starts_from_the_beginning() -> None:
    found = decided({k: standing() for k in range(3)})
    assert found["first"] == 0 and found["checkpoint"] is None
    assert "from the beginning" in words(found, SPEC)


def test_parts_of_a_lost_node_go_to_the_nodes_with_the_fewest() -> None:
    found = decided(without(2), lost={2: SILENT})
    assert found["nodes"] == [0, 1] and found["without"] == [2]
    assert found["parts"] == {"0": [0, 2], "1": [1]}


@pytest.mark.parametrize(
    ("spec", "standings", "more", "why"),
    [
        ({}, ALL, {"stop": True}, ""),
        ({}, ALL, {"cause": {**killed(), "kind": "nan"}}, "the loss would become NaN or infinite again"),
        ({"generation": 3}, ALL, {}, "the limit of run.restarts (3) is reached"),
        (
            {},
            {k: standing(stepped=False) for k in range(3)},
            {},
            "no process had trained a step, so it would fail again",
        ),
        ({}, without(2, ALL), {"lost": {2: SILENT}}, "no remaining node has part 2"),
        (
            {"min_nodes": 3},
            without(2),
            {"lost": {2: SILENT}},
            "training nodes left: 2, needed: 3 (run.min_nodes)",
        ),
        (
            {},
            {0: SHARED[0]},
            {"lost": {1: SILENT, 2: SILENT}},
            "only 1 of 3 nodes can reach each other, and the others may go on by themselves; no answer from "
            "node1 (b), node2 (c)",
        ),
        (
            {"nodes": (*NODES[:2], replace(NODES[2], role="absent"))},
            {0: SHARED[0]},
            {"lost": {1: KILLED}, "away": {1}},
            "only 1 of 2 nodes can reach each other, and the others may go on by themselves",
        ),
    ],
)
def test_why_a_run_does_not_start_again(
    spec: dict[str, Any], standings: Mapping[int, Standing], more: dict[str, Any], why: str
) -> None:
    found = decided(standings, replace(SPEC, **spec), **more)
    assert (found["restart"], found["why"]) == (False, why)


@pytest.mark.parametrize("generation", [0, 3])
def test_a_server_that_was_cut_off_leaves_the_run_to_the_others(generation: int) -> None:
    # Server 0 has lost the lead node 2; server 1 has the same parts, so the others go on without a restart.
    spec = replace(SPEC, hub=2, generation=generation)
    spec = changed(spec, role=("server", "server", "worker"), parts=((0,), (0,), (1,)))
    alone = decided({0: SHARED[0]}, spec, lost={2: SILENT, 1: SILENT}, cause={**killed(), "kind": "lost"})
    assert not alone["restart"] and alone["left"]
    needed = changed(spec, parts=((0,), (1,), (1,)))
    ended = decided({0: SHARED[0]}, replace(needed, generation=3), lost={2: SILENT, 1: SILENT})
    assert not ended["restart"] and not ended["left"], "the others cannot go on without part 0, and no restart is left"
    assert not decided({0: SHARED[0]}, spec, lost={2: SILENT, 1: SILENT}, stop=True)["left"]


@pytest.mark.parametrize("how", ["killed", "half", "before the first step"])
def test_one_of_several_nodes_may_go_on_alone(how: str) -> None:
    if how == "killed":
        found = decided({0: SHARED[0]}, lost={1: KILLED}, ended={2})
    elif how == "half":
        found = decided({0: SHARED[0]}, changed(SPEC, role=("worker", "worker", "absent")), lost={1: SILENT})
    else:
        standings = {k: standing(parts=(0, 1, 2), stepped=False) for k in (0, 1)}
        found = decided(standings, lost={2: SILENT})
    assert found["restart"]


def test_a_node_that_still_reads_its_checkpoint_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    hub = Hub(SPEC, loop)
    meeting = _Rendezvous(SPEC, SPEC, loop, hub, killed(), {"records": [], "gone": {}})
    hub.cause = killed()
    for member in hub.members.values():
        member.heard = time.monotonic()
    hub.members[2].standing, hub.members[1].state = SHARED[2].to_json(), "deciding"
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 60.0)
    assert meeting.look(SHARED[0]) is None, "its processes have ended"
    hub.members[1].state = "stopping"
    decision = meeting.look(SHARED[0])
    assert decision is not None and decision["nodes"] == [0, 2]


def test_a_thousand_restarts_with_long_reasons_fit_into_a_message(tmp_path: Path) -> None:
    cause = make_cause(1, "rank1", "failure", "x" * 2000, 1000.0)
    one = record(decided(SHARED, cause=cause), SPEC)
    made = Restarts(SPEC, Loop(), Journal(str(tmp_path), 0))
    made.records = [{**one, "generation": k} for k in range(1, 1001)]
    made.begin_rendezvous(SPEC, Peers(SPEC), cause)
    assert made.rendezvous is not None
    decision = made.rendezvous.look(SHARED[0])
    assert decision is not None and decision["records"][-1]["generation"] == 1000
    assert len(json.dumps(decision)) < MAX_LINE / 2


def test_a_node_that_comes_back_has_its_parts_again() -> None:
    spec = changed(SPEC, role=("worker", "worker", "absent"), parts=((0, 2), (1,), ()))
    spec = replace(spec, generation=1)
    found = decided(ALL, spec)
    assert found["nodes"] == [0, 1, 2] and found["parts"] == {"0": [0, 2], "1": [1], "2": [2]}


def test_the_next_attempt_of_a_node() -> None:
    found = decided(
        {1: standing(2, 140, (0, 1)), 2: standing(2, 120, (2,))}, replace(SPEC, node_rank=1), lost={0: SILENT}
    )
    spec = next_spec(replace(SPEC, node_rank=2, run_dir="/w/node2"), found)
    assert (spec.generation, spec.active, spec.ranks, spec.hub) == (1, (1, 2), (2,), 1)
    assert (spec.hub_node.address, spec.hub_node.control_port) == ("10.0.0.1", 101)
    assert [(node.role, node.parts) for node in spec.nodes] == [("absent", ()), ("worker", (0, 1)), ("worker", (2,))]
    assert spec.server is not None and spec.server["argv"][3] == "2"
    assert process_environment(spec, spec.server, "", 10.0)["GNNFLEET_PART_IDS"] == "2"
    env = rank_environments(spec)[2]
    assert (env["WORLD_SIZE"], env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("3", "1", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["GNNFLEET_RESTART"]) == ("10.0.0.1", "201", "1")
    assert env["GNNFLEET_RESUME"] == "/w/node2/checkpoints/e2.pt"
    assert spec.members == (2,) and spec.crew.spare() == []
    before = {
        "run_id": "r1",
        "version": 1,
        "nodes": [{"node_rank": k, "endpoint": f"e{k}", "parts": [k], "ranks": [k]} for k in range(3)],
    }
    assert cluster_file(before, spec, found) == {
        "run_id": "r1",
        "version": 2,
        "nodes": [
            {"node_rank": 1, "endpoint": "e1", "parts": [0, 1], "ranks": [0, 1]},
            {"node_rank": 2, "endpoint": "e2", "parts": [2], "ranks": [2]},
        ],
    }


def test_a_restart_on_the_first_lead_node_keeps_its_master_address() -> None:
    spec = next_spec(SPEC, decided({k: standing() for k in range(3)}))
    env = rank_environments(spec)[0]
    assert env["MASTER_ADDR"] == "gnn0" and "GNNFLEET_RESUME" not in env


def write_checkpoint(folder: Path, name: str, content: bytes, digested: bytes | None = None) -> None:
    """Write a checkpoint file that ends with the digest of ``digested`` (default: of ``content``)."""
    comment = b"sha256:" + hashlib.sha256(content if digested is None else digested).hexdigest().encode()
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / name).write_bytes(content + len(comment).to_bytes(2, "little") + comment)


def test_the_newest_checkpoint_that_is_not_damaged_is_taken(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) is None
    for name in ("epoch-0001.pt", "epoch-0002-step-000040.pt", "epoch-0002.pt", "last.pt", "other.pt"):
        write_checkpoint(tmp_path, name, b"whole")
    write_checkpoint(tmp_path, "epoch-0002-step-000120.pt", b"changed", digested=b"whole")
    (tmp_path / "checkpoints/epoch-0003.pt").write_bytes(b"cut off")
    (tmp_path / "checkpoints/epoch-0004.pt").mkdir()
    assert newest_checkpoint(str(tmp_path)) == {"file": "epoch-0002-step-000040.pt", "epoch": 2, "step": 40}


def test_a_shared_folder_has_the_parts_whose_files_are_complete(tmp_path: Path) -> None:
    files = [{"path": f"part{p}/x.npy", "bytes": 3, "sha256": ""} for p in range(3)]
    (tmp_path / "manifest.json").write_text(json.dumps({"num_parts": 3, "files": files}))
    for p, text in ((0, "abc"), (2, "ab")):
        (tmp_path / f"part{p}").mkdir()
        (tmp_path / f"part{p}/x.npy").write_text(text)
    spec = changed(SPEC, parts=((1,), (), ()))
    assert parts_on_disk(spec) == (1,)
    assert parts_on_disk(replace(spec, data_dir=str(tmp_path))) == (0, 1)


def test_files_that_name_ranks_are_moved_and_logs_stay(tmp_path: Path) -> None:
    for name in ("outcomes/rank0.json", "procs/rank0.json", "logs/rank0.log", "progress-rank0", "metrics-rank0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for name in ("server.ready", "cluster.json", "state.json"):
        (tmp_path / name).write_text("x")
    archive(str(tmp_path), 0)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    moved = {"outcomes/rank0.json", "procs/rank0.json", "progress-rank0", "server.ready", "cluster.json", "state.json"}
    assert left == {"logs/rank0.log", "metrics-rank0.jsonl", "state.json", *(f"attempts/0/{name}" for name in moved)}
    assert (tmp_path / "outcomes").is_dir() and (tmp_path / "procs").is_dir()


def test_each_rank_sees_its_own_mig_instance() -> None:
    trainer = {"argv": ["train"], "env": {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}}
    spec = replace(changed(SPEC, ranks=((2, 3), (0,), (1,))), trainer=trainer)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in rank_environments(spec).values()] == ["MIG-a", "MIG-b"]
    whole = replace(spec, trainer={"argv": ["train"], "env": {"CUDA_VISIBLE_DEVICES": "0,1"}})
    assert {env["CUDA_VISIBLE_DEVICES"] for env in rank_environments(whole).values()} == {"0,1"}
