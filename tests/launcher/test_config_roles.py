"""Tests of settings for roles, replicas and serving clusters, and of settings that contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.config.host_filter import filtered
from launcher.config.loader import load_config, to_yaml
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig
from launcher.errors import ConfigError
from launcher.files import CODE_ROOT
from launcher.run.config_of_options import overrides_of

DATA = "data: {dataset: synthetic}\n"
SERVERS = "nodes:\n  - {host: s1, role: server}\n  - {host: s2, role: server}\n  - {host: c, role: client}\n"


def load(folder: Path, text: str, overrides: Sequence[str] = ()) -> ClusterConfig:
    path = folder / "c.yml"
    path.write_text(text)
    return load_config(path, overrides)


def problems(folder: Path, text: str, overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, overrides)
    return [f"{p.line}: {p.message}" if p.line else str(p) for p in caught.value.problems]


MISTAKES = {
    SERVERS.replace("role: client", "role: clent") + DATA: [
        "4: nodes.2.role: expected one of worker, server, client, found the text `clent`; did you mean `client`?"
    ],
    "nodes:\n  - {host: a, role: client}\n  - {host: b, role: client}\n" + DATA: [
        "1: nodes: all are clients, so no node holds the graph; give some nodes `role: server` or `role: worker`, or "
        "name a serving cluster (--set data.serving=NAME)"
    ],
    SERVERS + "data:\n  dataset: synthetic\n  replicas: 3\n": [
        "7: data.replicas is 3, but only 2 nodes hold parts; lower it, or add nodes of `role: server`"
    ],
    "nodes: [a]\ndata: {dataset: synthetic, replicas: 2}\n": [
        "2: data.replicas is 2, but only 1 node holds parts; lower it, or add nodes of `role: server`"
    ],
    SERVERS + "data:\n  dataset: synthetic\n  num_parts: 1\n": [
        "7: fewer parts than nodes: data.num_parts is 1, but 2 nodes hold parts; leave num_parts out or raise it"
    ],
    "nodes:\n  - host: a\n    role: server\n    procs: 2\n  - b\n" + DATA: [
        "4: nodes.0.procs: a server starts no training processes; leave procs out, or make it `role: worker`"
    ],
    "nodes:\n  - host: a\n    role: server\n    devices: [0]\n  - b\n" + DATA: [
        "4: nodes.0.devices: a server starts no training processes; leave devices out, or make it `role: worker`"
    ],
    "nodes: [a]\ndata: {serving: ../products}\n": [
        "2: data.serving: '../products' is not a valid name of a serving cluster; names have up to 80 letters, digits, "
        "`-` and `_`",
    ],
    "nodes: [a, b]\ndata:\n  serving: products\n  num_parts: 4\n  folder: x\n  replicas: 2\n": [
        "4: data.num_parts: the parts are those of the serving cluster `products` (data.serving); leave num_parts out",
        "5: data.folder: the parts are those of the serving cluster `products` (data.serving); leave folder out",
        "6: data.replicas: the parts are those of the serving cluster `products` (data.serving); leave replicas out",
    ],
    SERVERS + DATA + "run: {server_buffer: 0, server_threads: few, server_wait: -1}\n": [
        "6: run.server_buffer: must be at least 1; found 0",
        "6: run.server_threads: expected a whole number or `auto`, found the text `few`",
        "6: run.server_wait: must be at least 0 and below 1000000; found -1.0",
    ],
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: repr(text)[-50:])
def test_every_mistake_is_reported_with_its_line(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text) == MISTAKES[text]


def test_only_training_nodes_have_processes(tmp_path: Path) -> None:
    config = load(tmp_path, "defaults: {devices: [0, 1]}\n" + SERVERS + DATA + "train: {backend: nccl}\n")
    assert config.world_size == 2 and config.num_parts == 2 and config.holders == (0, 1)
    assert [(node.devices, node.nproc) for node in config.nodes] == [((), 0), ((), 0), ((0, 1), 2)]


@pytest.mark.parametrize(
    "overrides",
    [overrides_of({"num_training_procs": 3}, ()), ("defaults.procs=3",), ("nodes.*.procs=3",)],
    ids=["--num-training-procs", "defaults", "all nodes"],
)
def test_procs_of_all_nodes_do_not_apply_to_servers(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = load(tmp_path, SERVERS + DATA, overrides)
    assert [node.procs for node in config.nodes] == [None, None, 3] and config.world_size == 3


def test_procs_of_a_single_server_are_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, SERVERS + DATA, ["nodes.1.procs=3"]) == [
        "--set nodes.1.procs=3: nodes.1.procs: a server starts no training processes; leave procs out, or make it "
        "`role: worker`"
    ]


def test_a_role_may_be_a_default(tmp_path: Path) -> None:
    text = "defaults: {role: server, procs: 2}\nnodes: [s1, s2, {host: c, role: client}]\n" + DATA
    assert [(node.role, node.procs) for node in load(tmp_path, text).nodes] == [
        ("server", None),
        ("server", None),
        ("client", 2),
    ]


def test_a_config_of_a_serving_cluster_also_works_for_its_runs(tmp_path: Path) -> None:
    # With `data.serving`, a run ignores `num_parts`, `replicas` and `folder`, which only `gnnfleet serve` uses.
    text = SERVERS + "data: {dataset: synthetic, num_parts: 4, replicas: 2, folder: p}\n"
    config = load(tmp_path, text, ["data.serving=products"])
    run = resolve_run(config)
    assert [node.host for node in run.nodes] == ["c"] and not run.makes_parts and run.num_parts == 0
    (tmp_path / "kept").mkdir()
    kept = load(tmp_path / "kept", to_yaml(run))
    assert resolve_run(kept).nodes == run.nodes and kept.data.serving == "products"


def test_a_run_that_attaches_needs_no_dataset_and_no_servers(tmp_path: Path) -> None:
    text = "nodes:\n  - {host: a, role: client}\n  - b\ndata: {serving: products}\n"
    config = load(tmp_path, text)
    assert config.data.dataset == "" and {node.role for node in resolve_run(config).nodes} == {"client"}


def test_filters_respect_roles(tmp_path: Path) -> None:
    config = load(tmp_path, SERVERS + "  - {host: d, role: client}\n" + DATA + "run: {master_addr: c}\n")
    with pytest.raises(Exception, match=r"give --master-addr auto, as the lead node is now d \(node2\)"):
        filtered(config, (), ("c",))
    assert [node.host for node in filtered(config, (), ("s1",)).nodes] == ["s2", "c", "d"]
    with pytest.raises(Exception, match=r"s1 has no `devices` in the config; it is a server"):
        filtered(config, ("s1:0",), ())


def test_template_of_servers_and_clients() -> None:
    config = load_config(CODE_ROOT / "templates/server_client.yml")
    assert [node.role for node in config.nodes] == ["server"] * 2 + ["client"] * 3
    assert (config.data.replicas, config.num_parts, config.world_size) == (2, 4, 6)
