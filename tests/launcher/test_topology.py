"""Tests of ``data.topology``: the choice of ``auto``, the files sent, and environment variables."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.config.loader import load_config
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.node.programs.packages import graph_size
from launcher.plan.model import LaunchPlan
from launcher.plan.partition import PartFile, PartitionFiles
from launcher.plan.render import print_plan
from launcher.plan.serialize import read_run, run_json, to_json
from launcher.preflight.check_storage import cache_memory
from launcher.preflight.survey import GraphSize, Survey
from plan_kit import PRODUCTS, cluster, facts_of, parts_folder, plan_of

GB = 10**9


def parts_of(num_parts: int, edge_bytes: int, edge_files: int = 1) -> PartitionFiles:
    files = []
    for p in range(num_parts):
        files += [PartFile(f"part{p}/edges/e{i}/indices.npy", edge_bytes, "d", (9,)) for i in range(edge_files)]
        files.append(PartFile(f"part{p}/nodes/n/attrs/x.npy", 10**6, "d"))
    return PartitionFiles("parts", "synthetic", "f1", num_parts, (*files, PartFile("manifest.json", 9, "d")))


def with_data(config: ClusterConfig | None = None, **values: Any) -> ClusterConfig:
    config = config or cluster()
    return replace(config, data=replace(config.data, **values))


def topology_row(plan: LaunchPlan) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_plan(plan, console)
    assert isinstance(console.file, io.StringIO)
    rows = [line.split(None, 1)[1] for line in console.file.getvalue().splitlines() if line.startswith("  topology ")]
    return rows[0] if rows else ""


LOCAL = ClusterConfig((NodeConfig("localhost"),) * 4, DataConfig("synthetic"), transport="local")
SERVED = cluster(NodeConfig("s1", role="server"), NodeConfig("s2", role="server"), NodeConfig("c", role="client"))
CASES: dict[str, tuple[ClusterConfig, dict[str, Any], str]] = {
    "no parts yet": (cluster(), {}, "auto: decided when the parts exist"),
    "small": (
        cluster(),
        {"manifest": parts_of(2, 10**6)},
        "replicated (auto: the edges of all parts take 2.0 MB); 1.0 MB more for node0, 1.0 MB for node1",
    ),
    "more than one part each": (
        with_data(num_parts=3),
        {"manifest": parts_of(3, 10**6)},
        "replicated (auto: the edges of all parts take 3.0 MB); 2.0 MB more for node0, 1.0 MB for node1",
    ),
    "large": (
        cluster(),
        {"manifest": parts_of(2, 3 * GB)},
        "partitioned (auto: the edges of all parts take 6.0 GB; the limit is 4.0 GB per host)",
    ),
    "several nodes of a host": (
        LOCAL,
        {"manifest": parts_of(4, GB // 2)},
        "partitioned (auto: the edges of all parts take 2.0 GB for each of 4 nodes on localhost; the limit is 4.0 GB "
        "per host)",
    ),
    "little memory": (
        cluster(),
        {"manifest": parts_of(2, GB), "facts": facts_of(2, memory=16 * GB)},
        "partitioned (auto: the edges of all parts take 2.0 GB, more than a tenth of the memory of node0 (a), 16.0 GB)",
    ),
    "asked for": (
        with_data(topology="replicated"),
        {"manifest": parts_of(2, 3 * GB)},
        "replicated (set by data.topology); 3.0 GB more for node0, 3.0 GB for node1",
    ),
    "asked for the other": (
        with_data(topology="partitioned"),
        {"manifest": parts_of(2, 10)},
        "partitioned (set by data.topology)",
    ),
    "all hold all": (
        with_data(replicas=2),
        {"manifest": parts_of(2, 10)},
        "partitioned (auto: each node that holds parts has all of them)",
    ),
    "servers and a client": (
        SERVED,
        {"manifest": parts_of(2, 10**6)},
        "replicated (auto: the edges of all parts take 2.0 MB); 1.0 MB more for node0, 1.0 MB for node1",
    ),
    "a serving cluster": (
        SERVED,
        {"manifest": parts_of(2, 10**6), "serve_only": True},
        "replicated (auto: the edges of all parts take 2.0 MB); 1.0 MB more for node0, 1.0 MB for node1",
    ),
    "many files": (
        cluster(*(NodeConfig(f"h{k}") for k in range(10))),
        {"manifest": parts_of(10, 10, edge_files=1001)},
        "partitioned (auto: sending the edges of all parts to all nodes would take 100,100 files)",
    ),
    "many nodes": (
        with_data(cluster(*(NodeConfig(f"h{k}") for k in range(5))), num_parts=6),
        {"manifest": parts_of(6, 10**6)},
        "replicated (auto: the edges of all parts take 6.0 MB); 4.0 MB to 5.0 MB more for each node",
    ),
    "one node": (cluster(NodeConfig("a")), {"manifest": parts_of(1, 10)}, ""),
    "nodes of a serving cluster": (with_data(serving="products"), {"serving": PRODUCTS}, ""),
    "verify, not looked at": (with_data(mode="verify"), {}, "auto: decided after preflight"),
    "verify, all there": (
        with_data(mode="verify"),
        {"facts": facts_of(2, topology_bytes=10**6)},
        "replicated (auto: the edges of all parts take 1.0 MB)",
    ),
    "verify, not all there": (
        with_data(mode="verify", folder="/mnt/parts"),
        {"facts": facts_of(2)},
        "partitioned (auto: node0 (a) does not have the edges of all parts in /mnt/parts)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_chosen_topology_and_its_reason(name: str) -> None:
    config, more, row = CASES[name]
    plan = plan_of(config, **more)
    assert topology_row(plan) == row
    assert plan == plan_of(config, **more)
    assert read_run(run_json(plan)).topology == plan.topology
    assert json.loads(to_json(plan))["topology"]["choice"] == (row.split()[0] if "(" in row else "")


def test_edges_of_other_parts_are_sent_to_nodes_with_parts(tmp_path: Path) -> None:
    plan = plan_of(SERVED, manifest=parts_folder(tmp_path, 2))
    sent = [{file.dest.removeprefix(f"{node.data_dir}/") for file in node.files} for node in plan.nodes]
    indptr, rows = "part{}/edges/node__to__node/indptr.npy", "part{}/nodes/node/attrs/x.npy"
    for k in (0, 1):
        assert {indptr.format(0), indptr.format(1), rows.format(k)} <= sent[k]
        assert rows.format(1 - k) not in sent[k]
        assert plan.nodes[k].topology_bytes == len(indptr) - 1
    assert not any("indptr" in name for name in sent[2])


def test_variables_of_the_processes() -> None:
    run = RunConfig(wire_rows="int8")
    config = replace(with_data(SERVED, cache="1GB", topology="replicated"), run=run)
    nodes = plan_of(replace(config, nodes=(*config.nodes, NodeConfig("w")))).nodes
    expected = {"GNNFLEET_TOPOLOGY": "replicated", "GNNFLEET_CACHE": "1GB", "GNNFLEET_WIRE_ROWS": "int8"}
    for command in (nodes[0].server, nodes[3].server, nodes[3].trainer):
        assert command is not None and command.env.items() >= expected.items()
    client = nodes[2].trainer
    assert client is not None and client.env["GNNFLEET_WIRE_ROWS"] == "int8"
    assert not {"GNNFLEET_TOPOLOGY", "GNNFLEET_CACHE"} & set(client.env)
    alone = plan_of(cluster(NodeConfig("a"))).nodes[0].trainer
    assert alone is not None and not any(name in alone.env for name in expected)


def test_no_process_compares_digests_if_the_config_disables_it() -> None:
    for digests, expected in ((True, None), (False, "0")):
        for node in plan_of(with_data(SERVED, digests=digests)).nodes:
            for command in filter(None, (node.server, node.trainer)):
                assert command.env.get("GNNFLEET_DIGESTS") == expected


def test_rounded_rows_and_precision_are_flags_if_configured(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    text = "nodes: [a, b]\ndata: {{dataset: synthetic{}}}\n{}\n"
    file.write_text(text.format(", partition: {rows: float16}", "train: {precision: bfloat16}"))
    plan = plan_of(load_config(file))
    assert (
        plan.partition is not None
        and plan.partition.command.argv[plan.partition.command.argv.index("--rows") + 1] == "float16"
    )
    trainer = plan.nodes[0].trainer
    assert trainer is not None and "--precision bfloat16" in " ".join(trainer.argv)
    file.write_text(text.format("", ""))
    plan = plan_of(load_config(file))
    assert plan.partition is not None and "--rows" not in plan.partition.graph


def test_graph_size_includes_edges_only_if_those_of_all_parts_are_present(tmp_path: Path) -> None:
    found = parts_folder(tmp_path, 2)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    kind = {"nodes": {"node": {"num_nodes": 8}}}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **kind}))
    assert graph_size(str(tmp_path / "manifest.json"))["topology_bytes"] == found.topology_bytes > 0
    (tmp_path / "part1/edges/node__to__node/indptr.npy").unlink()
    assert graph_size(str(tmp_path / "manifest.json"))["topology_bytes"] == 0


@pytest.mark.parametrize(
    ("cache", "kept"), [("10%", 40_000), ("0", 0), ("100 kB", 100_000), ("1GB", 400_000), ("100%", 400_000)]
)
def test_the_cache_counts_on_nodes_whose_ranks_fetch_rows(cache: str, kept: int) -> None:
    config = with_data(cluster(NodeConfig("a"), NodeConfig("s", role="server"), NodeConfig("c", role="client")))
    config, size = with_data(config, cache=cache), GraphSize(nodes=2000, row_bytes=400.0)
    assert [cache_memory(Survey(config, {}, {}, graph=size), k) for k in range(3)] == [kept, 0, 0]
    assert cache_memory(Survey(config, {}, {}), 0) == 0
