"""Tests that the work of launcher and hub grows with the nodes and not with their square, in calls and bytes."""

from __future__ import annotations

import cProfile
import pstats
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from follow_kit import FakeNode, Scene, state, step
from launcher.files import CODE_ROOT
from launcher.hostlist import fold
from launcher.node.json_reader import record_in
from launcher.node.json_records import STATE
from launcher.node.peers.hub import Hub, MemberStatus
from launcher.node.record import write_json
from launcher.node.spec import Crew, NodeSpec, RunNode
from launcher.node.watch import Watcher
from launcher.preflight.preflight import run_preflight
from launcher.report.outcome import Outcome, aftermath_of
from wire_kit import cluster, machine


def calls(work: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def is_linear(counts: list[int]) -> bool:
    """Whether ``counts`` for n, 2n and 4n nodes grow linearly."""
    once, twice, four = counts
    return (four - twice) / (twice - once) == pytest.approx(2, rel=0.15)


# -- the hub --------------------------------------------------------------


class FakeLink:
    waiting = False
    node_rank = 0

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def hub_of(nodes: int) -> Hub:
    everyone = tuple(RunNode(f"node{k} (h{k})", parts=(k,)) for k in range(nodes))
    spec = NodeSpec("r1", "t", 0, "", everyone, None, None, start_timeout=60.0, grace=1.0, peer_timeout=60.0)
    hub = Hub(spec, SimpleNamespace())  # type: ignore[arg-type]
    for member in hub.members.values():
        member.link = FakeLink()  # type: ignore[assignment]
    return hub


def beat(hub: Hub, beats: int = 1) -> None:
    """Let each member report ``beats`` times, and the hub itself too."""
    own = {"state": "training", "trained": False, "final": None, "cause": None, "ranks": {}, "findings": []}
    own |= {"stacks": None, "own_ranks": [], "t": 1.0, "offset": 0.0}
    for _ in range(beats):
        for member in hub.members.values():
            hub._take_report(member, own)
        hub.report(own)


def tables(member: MemberStatus) -> int:
    assert isinstance(member.link, FakeLink)
    return sum(message["peers"] is not None for message in member.link.sent)


def test_work_and_bytes_of_the_hub_for_each_report_do_not_grow_with_the_nodes() -> None:
    counts = []
    for nodes in (65, 129, 257):
        hub, each = hub_of(nodes), 1 + (nodes - 1) // 64  # so often each member gets the table
        counts.append(calls(lambda hub=hub, each=each: beat(hub, each)) // each)
        assert {tables(member) for member in hub.members.values()} == {1}, "the table of all nodes, once in a while"
    assert is_linear(counts), counts


def test_members_get_the_table_of_all_nodes_at_different_times() -> None:
    hub = hub_of(257)
    beat(hub)
    assert 40 < sum(tables(member) for member in hub.members.values()) < 64


def test_a_run_of_many_servers_knows_quickly_which_of_them_it_can_lose() -> None:
    def spare(nodes: int) -> list[int]:
        roles = ("worker", *("server",) * (nodes - 1))
        everyone = [RunNode("", role, parts=(k, (k + 1) % nodes)) for k, role in enumerate(roles)]
        return Crew(0, everyone).spare()

    assert spare(10) == list(range(1, 10))
    assert is_linear([calls(lambda n=n: spare(n)) for n in (100, 200, 400)])


@pytest.mark.parametrize(("needed", "soft"), [(100, 256), (500, 512)])
def test_the_limit_of_open_files_is_raised_if_a_run_needs_more(needed: int, soft: int) -> None:
    show = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    program = f"from launcher.node.procs import allow_open_files; allow_open_files({needed}); {show}"
    limited = ["bash", "-c", 'ulimit -Sn 256; ulimit -Hn 512; exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(limited, cwd=CODE_ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == [str(soft), "512"]


# -- the launcher ---------------------------------------------------------


def test_a_watcher_sends_no_states_of_other_nodes_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {str(k): {"state": "training", "age": 0.5} for k in range(300)}
    write_json(
        str(tmp_path / "state.json"), {"state": "training", "time": 1.0, "pid": 1, "start_ticks": 1, "peers": peers}
    )
    assert len(record_in(STATE, str(tmp_path / "state.json"))["peers"]) == 300  # type: ignore[index]
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(Watcher, "emit", lambda self, message: sent.append(message))
    for wanted in ((), ("7", "900")):
        Watcher(str(tmp_path), {}, (), wanted).emit_state()
    assert [message["state"]["peers"] for message in sent] == [{}, {"7": peers["7"]}]


def test_a_watcher_reads_a_state_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(Watcher, "emit", lambda self, message: sent.append(message))
    watcher = Watcher(str(tmp_path), {}, ())
    for number in (1, 1, 2):
        write_json(str(tmp_path / "state.json"), {"state": "training", "time": 1.0, "pid": number, "start_ticks": 1})
        watcher.emit_state()
        assert calls(watcher.emit_state) < 30
    assert [message["state"]["pid"] for message in sent] == [1, 2]


def test_following_a_run_of_an_own_command_is_linear_in_its_messages(tmp_path: Path) -> None:
    def follow(nodes: int) -> int:
        scene = Scene(tmp_path, *(FakeNode(k) for k in range(nodes)), own_command=("sleep",))
        follower = scene.follower
        for k in range(nodes):
            for text in (state(), step(k, 3)):
                follower._put(message_of(k, text))

        def handle() -> None:
            while not follower._messages.empty():
                follower._turn()
            follower._check_timeouts(0.0)

        return calls(handle)

    assert is_linear([follow(nodes) for nodes in (50, 100, 200)])


def message_of(k: int, text: str) -> Any:
    from launcher.node.json_records import message_in
    from launcher.run.node_stream import NodeMessage

    message = message_in(text)
    assert message is not None
    return NodeMessage(k, message)


@pytest.mark.slow
def test_preflight_is_linear_in_the_main_thread() -> None:
    counts = []
    for nodes in (66, 132):
        transports = {
            k: machine(k, address=f"10.0.{k // 250}.{k % 250}", addresses=[["eth0", f"10.0.{k // 250}.{k % 250}"]])
            for k in range(nodes)
        }
        counts.append(calls(lambda n=nodes, to=transports: run_preflight(cluster(n), to)))
    assert counts[1] < 2.2 * counts[0], counts


def test_a_line_about_many_nodes_names_some_of_them() -> None:
    lost = [Outcome.of_node(k, f"h{k * k}", "gone", 2.0 + k) for k in range(200)]
    (line,) = (text for text in aftermath_of(lost[0], lost).lines if text.startswith("then"))
    assert "192 more" in line and len(line) < 200
    assert fold((f"n{k * k}" for k in range(2, 100)), 4) == "n4, n9, n16, … 95 more"
