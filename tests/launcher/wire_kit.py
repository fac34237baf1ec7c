"""Test kit for the network test of preflight: configs and fake nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fake_transport import FakeTransport, wire
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.node.programs import probe as probe_program
from launcher.preflight.survey import Inquiry

Closed = Callable[[int, int, str, int], str]


def cluster(count: int, *, run: RunConfig | None = None, **of_node: Any) -> ClusterConfig:
    nodes = tuple(NodeConfig(host=f"host{k}", **of_node) for k in range(count))
    run = run or RunConfig(master_port=29500, control_port=29400, service_port=29600)
    return ClusterConfig(nodes=nodes, data=DataConfig(dataset="synthetic"), run=run)


@cache
def this_machine() -> dict[str, Any]:
    return probe_program.main(Inquiry.about(cluster(1)).request(0))


def machine(k: int, closed: Closed | None = None, **facts: Any) -> FakeTransport:
    def probe(request: dict[str, Any]) -> dict[str, Any]:
        own = {"hostname": f"box{k}", "address": f"10.0.0.{k}", "interface": "eth0", "workdir": f"/w/{k}"}
        addresses = [["lo", "127.0.0.1"], ["eth0", f"10.0.0.{k}"]]
        return {**this_machine(), **own, "addresses": addresses, "busy_ports": {}, **facts}

    fake = FakeTransport(target=f"host{k}", node_rank=k)
    return fake.on_program("probe", probe).on_program("network", wire(closed))
