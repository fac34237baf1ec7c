"""Golden test of messages about preflight's network test, tmux sessions and the agent."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fake_transport import FakeTransport, printed
from golden_kit import check_messages
from launcher.command import Command
from launcher.config.schema import ClusterConfig, DataConfig
from launcher.errors import NodeCallError, SessionError
from launcher.preflight.preflight import run_preflight
from launcher.run.tmux_session import start_session
from launcher.transport.base import Transport
from launcher.transport.local import LocalTransport
from launcher.transport.rpc import NodeAgent
from test_session import home, make  # noqa: F401  fixtures
from wire_kit import Closed, cluster, machine

ALWAYS = ("network", "interface", "shared folder")


def findings_text(config: ClusterConfig, machines: dict[int, Transport], checks: tuple[str, ...] = ALWAYS) -> str:
    """Run preflight. Return the findings of ``checks`` with their remedies, without duplicates."""
    report = run_preflight(config, machines)
    found = [
        one for one in report.findings if one.check in checks and (one.severity != "ok" or one.check != "interface")
    ]
    lines = [f"{one.severity} {one.check}: {one.message}" + f"\n    {one.remedy}" * bool(one.remedy) for one in found]
    return "\n".join(dict.fromkeys(lines))


def closed_for(why: str, sources: set[int], targets: set[int], *ports: int) -> Closed:
    return lambda i, j, address, port: why if i in sources and j in targets and (not ports or port in ports) else ""


CLOSED = {
    "a port of node0, from one node": closed_for("no answer", {2}, {0}, 29500),
    "a port of node0, from all": closed_for("refused", {0, 1, 2, 3}, {0}, 29400),
    "a node that nobody reaches": closed_for("no answer", {0, 1, 3}, {2}),
    "a node that reaches nobody": closed_for("no route", {3}, {0, 1, 2}),
    "free ports of a node": closed_for("no answer", {0, 1, 2}, {3}, 40003),
    "two networks": lambda i, j, *way: "no route" if (i < 2) != (j < 2) else "",
    "something else at the address": closed_for("stranger", {0, 1, 3}, {2}, 29602),
    "a name that one node does not know": closed_for("name", {1}, {3}, 29603),
    "a connection that is cut off": closed_for("reset", {1}, {3}, 29603),
}


def of_the_wire() -> Iterator[tuple[str, str]]:
    def four(closed: Closed) -> dict[int, Transport]:
        return {k: machine(k, closed) for k in range(4)}

    yield "all is well", findings_text(cluster(4), four(lambda *way: ""))
    for how, closed in CLOSED.items():
        yield how, findings_text(cluster(4), four(closed))
    config = cluster(2)
    wrong = replace(config, nodes=(replace(config.nodes[0], interface="ib7"), config.nodes[1]))
    yield "an interface that is not there", findings_text(wrong, {k: machine(k) for k in range(2)}, ("interface",))
    taken = machine(0).on_program(
        "network",
        lambda request: {"refused": {"29500": "Address already in use"}, "free": 1, "blocked": []},
    )
    yield "a port taken between two looks", findings_text(config, {0: taken, 1: machine(1)}, ("master port",))
    there = [["eth0", "10.0.0.1"], ["ib0", "10.9.0.1"]]
    other = {0: machine(0), 1: machine(1, addresses=there)}
    for one in other.values():
        one.on_program("network", _only("10.9.0.1"))
    report = run_preflight(config, other)
    yield (
        "another address is taken",
        "\n".join(
            f"{one.severity} {one.check}: {one.message}" for one in report.findings if "as not all" in one.message
        ),
    )


def _only(address: str):  # the reply function of the fake node program
    from fake_transport import wire

    return wire(lambda i, j, where, port: "no answer" if j == 1 and where != address else "")


def of_folders() -> Iterator[tuple[str, str]]:
    config = replace(cluster(3), data=DataConfig("synthetic", mode="verify", folder="/data/parts"))
    for how, written, seen, sizes in (
        ("one folder", True, (True, True), (1, 1, 1)),
        ("one node has another folder", True, (True, False), (1, 1, 1)),
        ("every node has its own", True, (False, False), (1, 1, 1)),
        ("one folder that cannot be written to", False, (False, False), (1, 1, 1)),
    ):
        machines: dict[int, Transport] = {}
        for k in range(3):
            reply = {"written": written, "seen": k > 0 and seen[k - 1], "identity": [sizes[k]]}
            machines[k] = machine(k, manifest=True).on_program("folders", lambda request, r=reply: r)
        yield how, findings_text(config, machines, ("shared folder",))


def of_the_agent() -> Iterator[tuple[str, str]]:
    node = FakeTransport(target="ann@gnn1", node_rank=1)
    for how, ended in (
        (
            "python is missing",
            printed(returncode=127, stderr="bash: line 1: /opt/env/bin/python: No such file or directory"),
        ),
        ("python ends in silence", printed(returncode=137)),
    ):
        node.on("/opt/env/bin/python", ended)
        with NodeAgent(node, Command(("/opt/env/bin/python",))) as agent, pytest.raises(NodeCallError) as caught:
            agent.call("network", {}, 5)
        yield how, str(caught.value)


def test_messages_of_preflight() -> None:
    check_messages("wire", [*of_the_wire(), *of_folders(), *of_the_agent()])


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_messages_of_a_start(make, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    told = []

    def start(how: str, plan, **options: float) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(SessionError) as caught:
            start_session(LocalTransport(), plan, **{"start_timeout": 10, **options})
        text = str(caught.value).replace(str(home), "HOME")
        told.append((how, re.sub(r"(?m)^.*/start.sh: line", "start.sh: line", text)))

    start("no python there", make("/no/such/python3")[1])
    start("setup that takes too long", make(setup=("echo loading modules >&2", "sleep 60"))[1], start_timeout=5)
    plan = make()[1]
    start_session(LocalTransport(), plan, start_timeout=10)
    start("twice", plan)
    monkeypatch.setenv("PATH", str(home))
    start("no tmux", plan)
    check_messages("start", told)
