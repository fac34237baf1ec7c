"""Tests of runs that wait in line (``--wait``): the order of tickets, the turns of several nodes, and supervisors."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.errors import UsageError
from launcher.manage.show_queue import HostLine, starts, to_json
from launcher.node import leases
from launcher.node.leases import Lease, LeaseHolder, in_the_way, take_turn, this_process, ticket, wait_in_line
from launcher.node.peers.hub import Hub, MemberStatus
from launcher.node.peers.member import Member
from launcher.node.peers.model import NO_TURN, Turn
from launcher.node.spec import NodeSpec, RunNode
from launcher.node.supervisor.waiting import Waiting
from launcher.preflight.finding import Finding
from launcher.preflight.preflight_report import PreflightReport
from launcher.report.waiting import waiting_words
from launcher.run.choose_hosts import chosen_nodes, numbers_needed
from node_kit import PYTHON, RunFolder
from peers_kit import Run
from plan_kit import facts_of
from waiting import wait_until

ENDS = "import time; print('up', flush=True); time.sleep(0.2)"
GOES_ON = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def folder_of_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


def holder(run_id: str, user: str = "alice", pid: int = 1) -> LeaseHolder:
    return LeaseHolder(run_id, 0, user, pid, 1, "boot", 1795262591.0, f"{user}@laptop")


def test_a_ticket_waits_for_holders_and_earlier_tickets_of_other_runs() -> None:
    mine = ticket(["cuda:0", "cpu:b-node0"], holder("b"), 10.0)
    found = [
        mine,
        Lease("cuda:0", *holder("a")),
        Lease("cuda:1", *holder("a")),
        Lease("cpu:c-node0", *holder("c")),
        Lease("cpu:b-node1", *holder("b")),  # of the same run
        ticket(["cuda:0"], holder("late"), 11.0),
        ticket(["cuda:0"], holder("second"), 9.0),
        ticket(["cpu:x"], holder("first"), 8.0),
        ticket(["cuda:7"], holder("elsewhere"), 1.0),
    ]
    assert [one.run_id for one in in_the_way(mine, found)] == ["a", "c", "first", "second"]
    again = ticket(["cuda:0"], holder("b", "bob"), 10.0)  # another user's run may have the same id
    assert [one.user for one in in_the_way(again, [mine])] == ["alice"] and not in_the_way(mine, [again])


def test_a_turn_takes_all_or_nothing(folder_of_leases: Path) -> None:
    other = this_process("a", 0)
    assert leases.take(["cuda:1"], other) == []
    mine = ticket(["cuda:0", "cuda:1"], this_process("b", 0), 5.0)
    assert (
        [one.resource for one in wait_in_line(mine)] == ["cuda:1"] == [one.resource for one in take_turn(mine, other)]
    )
    assert [one.resource for one in leases.held()] == ["cuda:1", "ticket:b-node0"]
    leases.release("a", 0)
    assert take_turn(mine, this_process("b", 0)) == []
    assert [one.resource for one in leases.held()] == ["cuda:0", "cuda:1", "ticket:b-node0"]
    leases.release("b", 0, mine.wants)
    assert [one.wants for one in leases.held()] == [("cuda:0", "cuda:1")]
    next(folder_of_leases.glob("ticket-*")).unlink()  # a cleaner of /tmp: it is filed again
    assert wait_in_line(mine) == [] and [one.resource for one in leases.held()] == ["ticket:b-node0"]


@pytest.mark.parametrize(
    "change", [{"wants": 3}, {"wants": [1]}, {"launched": "now"}, {"ends": -1}, {"pid": 2**22 + 1}]
)
def test_damaged_tickets_and_those_of_ended_processes_are_passed_over(
    folder_of_leases: Path, change: dict[str, Any]
) -> None:
    wait_in_line(ticket(["cuda:0"], this_process("a", 0), 1.0))
    file = next(folder_of_leases.iterdir())
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert wait_in_line(ticket(["cuda:0"], this_process("b", 0), 2.0)) == []


def test_the_end_that_a_run_expects_is_in_its_leases() -> None:
    me = this_process("a", 0)
    leases.take(["cuda:0", "port:1"], me)
    leases.take(["cuda:1"], this_process("b", 0))
    leases.expect_end(me, 1795262599.0)
    assert {one.resource: one.ends for one in leases.held()} == {
        "cuda:0": 1795262599.0,
        "cuda:1": 0,
        "port:1": 1795262599.0,
    }


# -- turns of many runs on many hosts, with messages that arrive late


class Hosts:
    """The leases of several hosts, in place of files; what a node wants names its host: ``cuda:<host>``."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leases: dict[str, list[Lease]] = {f"cuda:{k}": [] for k in range(count)}
        self.fails = False  #: whether the leases cannot be read or written now and then
        monkeypatch.setattr("launcher.node.supervisor.waiting._EVERY", 0.0)
        monkeypatch.setattr(leases, "this_process", lambda run_id, k, host: holder(run_id)._replace(node_rank=k))
        for name in ("wait_in_line", "take_turn", "release"):
            monkeypatch.setattr(leases, name, getattr(self, name))

    def wait_in_line(self, mine: Lease, patience: float | None = None) -> list[Lease]:
        self.fail_sometimes()
        (there,) = (self.leases[name] for name in mine.wants)
        if mine not in there:
            there.append(mine)
        return in_the_way(mine, there)

    def fail_sometimes(self) -> None:
        if self.fails and random.random() < 0.05:
            raise leases.LeaseError("the disk is full")

    def take_turn(self, mine: Lease, me: LeaseHolder) -> list[Lease]:
        self.fail_sometimes()
        (name,) = mine.wants
        found = in_the_way(mine, self.leases[name])
        holders = {one.run_id for one in self.leases[name] if not one.waits}
        assert found or holders <= {me.run_id}, f"{name} is held by {holders}"
        if not found:
            self.leases[name] = [one for one in self.leases[name] if one.waits] + [Lease(name, *me)]
        return found

    def release(self, run_id: str, node_rank: int, resources: Sequence[str]) -> None:
        for there in self.leases.values():
            there[:] = [
                one for one in there
                if (one.run_id, one.node_rank) != (run_id, node_rank) or one.resource not in resources
            ]  # fmt: skip


class Quiet:
    def event(self, kind: str, **more: object) -> None: ...

    def log(self, text: str) -> None: ...


class LateHub(Hub):
    """A hub whose ``members`` and ``turn`` are set by the test."""

    def __init__(self) -> None:
        self.turn, self.members, self.called = NO_TURN, {}, [NO_TURN]

    def call(self, turn: Turn) -> None:
        self.turn = turn
        self.called.append(turn)


class LateMember(Member):
    def __init__(self) -> None:
        self.turn, self.seen = NO_TURN, 0


class WaitingRun:
    """A run whose nodes wait (``Waiting``); node 0 leads. Messages between them arrive late, each kind in its order.

    late: its nodes file their tickets one by one, while other runs wait and run.
    """

    def __init__(self, number: int, hosts: list[int], launched: float, late: bool) -> None:
        self.hosts, self.order = hosts, (launched, f"run{number}")
        self.hub = LateHub()
        self.members = {k: LateMember() for k in range(1, len(hosts))}
        self.hub.members = {k: MemberStatus(k) for k in self.members}
        self.reports: dict[int, list[dict[str, Any]]] = {k: [] for k in self.members}
        common: dict[str, Any] = {"token": "", "run_dir": "", "server": None, "trainer": None}
        common |= {"start_timeout": 1.0, "grace": 1.0, "queued_at": launched}
        nodes = tuple(RunNode(f"node{k}") for k in range(len(hosts)))
        self.nodes = [
            Waiting(
                NodeSpec(
                    **common,
                    run_id=f"run{number}",
                    node_rank=k,
                    nodes=nodes,
                    leases=(f"cuda:{host}",),
                ),
                cast(Any, Quiet()),
            )
            for k, host in enumerate(hosts)
        ]
        self.late = late
        self.begun: set[int] = set()
        for k in range(0 if late else len(hosts)):
            self.begin(k)
        self.left = random.randint(1, 30)  # turns of work

    def begin(self, k: int) -> None:
        with suppress(leases.LeaseError):  # the next look files the ticket
            self.nodes[k].begin()
        self.begun.add(k)

    def step(self) -> None:
        """Let each node look, in any order, and some messages arrive."""
        for k in random.sample(range(len(self.nodes)), len(self.nodes)):
            if k and random.random() < 0.7 and self.reports[k]:
                seen = random.randint(1, len(self.reports[k]))  # each message has the whole state
                self.hub.members[k].place = self.reports[k][seen - 1]
                del self.reports[k][:seen]
            if k and random.random() < 0.7:
                member = self.members[k]
                member.seen = random.randint(member.seen, len(self.hub.called) - 1)
                member.turn = self.hub.called[member.seen]
            if k not in self.begun and random.random() < 0.05:
                self.begin(k)
            if k in self.begun and not self.nodes[k].over:
                self.nodes[k].look(self.members[k] if k else self.hub)
            if k and self.nodes[k].place is not None:
                self.reports[k].append({**(self.nodes[k].place or {})})

    @property
    def started(self) -> bool:
        return all(node.over for node in self.nodes)


@pytest.mark.parametrize("seed", [*range(60), 891])  # 891 has found a node that kept its leases
def test_random_runs_all_get_their_turn_and_never_share_a_host(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(seed)
    count = random.randint(1, 5)
    hosts = Hosts(count, monkeypatch)
    runs = [
        WaitingRun(
            number, random.sample(range(count), random.randint(1, count)), random.choice([1.0, 2.0, 3.0]), number > 2
        )
        for number in range(random.randint(2, 7))
    ]
    hosts.fails = True
    began: list[WaitingRun] = []
    waiting = list(runs)
    for _ in range(20_000):
        if not waiting:
            break
        run = random.choice(waiting)
        run.step()
        for node, host in zip(run.nodes, run.hosts, strict=True):
            there = [one.run_id for one in hosts.leases[f"cuda:{host}"] if not one.waits]
            assert not node.over or there == [run.order[1]], "a node that starts has its leases"
        if run.hub.turn["go"] and run not in began:
            began.append(run)
        run.left -= run.started
        if run.left <= 0:
            waiting.remove(run)
            for k, host in enumerate(run.hosts):
                hosts.release(run.order[1], k, [f"cuda:{host}"])
    assert not waiting, f"these never ran: {[one.order for one in waiting]}"
    assert not any(hosts.leases.values()), "tickets are removed"
    for late, run in enumerate(began):
        for other in began[late + 1 :]:
            free = not set(run.hosts) & set(other.hosts)
            assert free or other.late or run.order < other.order, "the earlier one first"


# -- supervisors


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(run_id: str, devices: list[int], launched: float, code: str = ENDS, **more: Any) -> Run:
        run = Run(tmp_path / run_id, len(devices), argv=[PYTHON, "-c", code], run_id=run_id, **more)
        for node, device in zip(run.nodes, devices, strict=True):
            node.spec |= {"leases": [f"cuda:{device}"], "queued_at": launched, "operator": "alice@laptop"}
        if len(devices) == 1:
            run.nodes[0].own["control_port"] = 0
        made.append(run)
        for node in run.nodes:
            node.start()
        return run

    yield make
    for run in made:
        for node in run.nodes:
            node.kill()


def state(node: RunFolder) -> dict[str, Any]:
    path = node.path / "state.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def waits_for(node: RunFolder) -> list[str]:
    return [one["run_id"] for one in (state(node).get("queue") or {"blockers": []})["blockers"]]


def ask_to_stop(node: RunFolder) -> None:
    (node.path / "control").mkdir(exist_ok=True)
    (node.path / "control/stop").write_text(json.dumps({"by": "bob@desk"}))


def started(node: RunFolder) -> float:
    return float(node.outcome(f"rank{node.spec['node_rank']}")["started"])


def test_supervisors_wait_and_start_in_the_order_of_launch(make_run: Callable[..., Run]) -> None:
    first = make_run("first", [0, 1], 10.0, GOES_ON)
    wait_until(lambda: all(node.says(f"rank{k}", "up")() for k, node in enumerate(first.nodes)))
    late = make_run("late", [1], 30.0)
    wait_until(lambda: waits_for(late.nodes[0]) == ["first"])
    early = make_run("early", [0, 1], 20.0)
    wait_until(lambda: [waits_for(node) for node in early.nodes] == [["first"], ["first"]])
    wait_until(lambda: waits_for(late.nodes[0]) == ["first", "early"])
    assert state(late.nodes[0])["queue"]["earlier"] == 1 and state(late.nodes[0])["state"] == "queued"
    assert not any((node.path / "logs/rank0.log").exists() for node in (*early.nodes, *late.nodes))
    ask_to_stop(first.nodes[0])
    ends = [node.end()["state"] for run in (first, early, late) for node in run.nodes]
    assert ends == ["stopped", "stopped", "done", "done", "done"]
    assert max(map(started, early.nodes)) < started(late.nodes[0]) and leases.held() == []


@pytest.mark.parametrize(("k", "restarts"), [(1, 0), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_a_killed_supervisor_is_passed_over_and_ends_its_run(
    make_run: Callable[..., Run], k: int, restarts: int
) -> None:
    holding = make_run("holding", [0, 1], 10.0, GOES_ON)
    wait_until(lambda: all(node.says(f"rank{k}", "up")() for k, node in enumerate(holding.nodes)))
    killed = make_run("killed", [0, 1], 20.0, restarts=restarts)
    later = make_run("later", [0], 30.0)
    wait_until(lambda: waits_for(later.nodes[0]) == ["holding", "killed"])
    wait_until(lambda: waits_for(killed.nodes[1]) == ["holding"])
    supervisor = killed.nodes[k].supervisor
    assert supervisor is not None
    supervisor.send_signal(signal.SIGKILL)
    end = killed.nodes[1 - k].end()
    assert end["state"] == "failed" and end["cause"]["kind"] == "lost" and end["cause"]["node_rank"] == k
    assert not end.get("restarts")
    ask_to_stop(holding.nodes[0])
    assert later.nodes[0].end()["state"] == "done"


def test_a_stop_request_ends_the_waiting(make_run: Callable[..., Run]) -> None:
    leases.take(["cuda:1"], this_process("holding", 0))
    run = make_run("waits", [0, 1], 20.0, restarts=2)
    wait_until(lambda: waits_for(run.nodes[1]) == ["holding"])
    ask_to_stop(run.nodes[1])
    for node in run.nodes:
        end = node.end()
        assert end["state"] == "stopped" and end["asked"]["by"] == "bob@desk" and end["restarts"] == []
    assert [one.run_id for one in leases.held()] == ["holding"]


def test_at_the_limit_the_run_fails_and_says_who_holds_what(make_run: Callable[..., Run]) -> None:
    leases.take(["cuda:1"], this_process("holding", 0))
    run = make_run("waits", [0, 1], 20.0, wait_limit=2.0, restarts=2)
    ends = [node.end() for node in run.nodes]
    assert [end["state"] for end in ends] == ["stopped", "failed"]
    why = ends[0]["cause"]["reason"]
    assert why.startswith("it has waited for 2 s, the limit of --wait: CUDA device 1 is held by run holding of ")
    assert [one.run_id for one in leases.held()] == ["holding"]


@pytest.mark.slow
def test_waiting_ends_no_run_by_a_timeout(make_run: Callable[..., Run]) -> None:
    leases.take(["cuda:1"], this_process("holding", 0))
    run = make_run("waits", [0, 1], 20.0, start_timeout=2.0, peer_timeout=2.0, stall_after=1.0)
    wait_until(lambda: waits_for(run.nodes[1]) == ["holding"])
    time.sleep(6.0)  # longer than all of these
    assert [state(node)["state"] for node in run.nodes] == ["queued", "queued"]
    leases.release("holding", 0)
    assert [node.end()["state"] for node in run.nodes] == ["done", "done"]


def test_a_run_without_wait_takes_free_cpus_beside_others_but_one_that_waits_has_them_alone(
    make_run: Callable[..., Run],
) -> None:
    leases.take([f"cpu:other-node{os.getpid()}"], this_process("other", 0))
    beside = make_run("beside", [0], 0.0)
    assert beside.nodes[0].end()["state"] == "done"
    waits = ticket(["cpu:waits-node0"], this_process("waits", 0), 1.0)
    assert [one.run_id for one in wait_in_line(waits)] == ["other"]
    assert [one.run_id for one in take_turn(waits, this_process("waits", 0))] == ["other"]


# -- what users see


def state_of(*blockers: tuple[str, bool], earlier: int = 0) -> dict[str, Any]:
    listed = [{"run_id": run_id, "user": "alice", "since": 0.0, "waits": waits} for run_id, waits in blockers]
    return {"state": "queued", "queue": {"since": 0.0, "earlier": earlier, "blockers": listed}}


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([state_of()], ""),
        ([{"state": "training", "queue": None}], ""),
        ([state_of(("a", False)), state_of()], "waiting for run a of alice on node0 since T, 1st in line"),
        (
            [state_of(("a", False), ("b", True), earlier=1), state_of(("a", False))],
            "waiting for run a of alice on node0, node1 since T, 2nd in line",
        ),
        ([state_of(("b", True), earlier=1)], "waiting behind run b of alice on node0 since T, 2nd in line"),
        (
            [state_of(*((name, False) for name in "abcd"), earlier=12)],
            "waiting for run a of alice on node0 since T and run b of alice on node0 since T and 2 more, 13th in line",
        ),
    ],
)
def test_words_about_what_a_run_waits_for(
    states: list[dict[str, Any]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.report.waiting.clock_time", lambda when: "T")
    assert waiting_words(dict(enumerate(states))) == words


def test_starts_are_estimated_from_the_ends_on_all_hosts() -> None:
    mine, behind = (ticket(["cuda:0"], holder(name), launched) for name, launched in (("b", 1.0), ("c", 2.0)))
    early, late = (Lease("cuda:0", *holder("a")), Lease("cuda:0", *holder("d")))
    lines = [
        HostLine("h0", (early._replace(ends=50.0),), (mine, behind)),
        HostLine("h1", (late._replace(ends=70.0),), (mine,)),
    ]
    assert starts(mine, lines) == 70.0 and starts(behind, lines) is None
    assert starts(mine, [lines[0], HostLine("h1", (late,), (mine,))]) is None, "its end is unknown"
    assert starts(mine, [HostLine("h0", (), (mine,))]) == 0.0
    (one,) = to_json([HostLine("h0", (early, Lease("port:7", *holder("b"))), (mine, behind))])
    shown = [(run["state"], run["run_id"], run.get("place"), run["resources"]) for run in one["runs"]]
    device = ["CUDA device 0"]
    assert shown == [("runs", "a", None, device), ("waits", "b", 1, device), ("waits", "c", 2, device)]


def report_of(nodes: Sequence[str], **ends: float) -> PreflightReport:
    """Return a report on nodes of which each is ``free``, ``unfit``, or used and waited for by the runs named.

    nodes: run ids by blanks; one in capitals waits. ends: when runs will have ended.
    """
    facts, findings = {}, []
    for k, word in enumerate(nodes):
        runs = [] if word in ("free", "unfit") else word.split()
        leases = [
            {"run_id": run, "resource": f"ticket:{run}" if run.isupper() else "cuda:0", "ends": ends.get(run, 0.0)}
            for run in runs
        ]
        facts[k] = replace(facts_of(1)[0], node_rank=k, leases=tuple(leases))
        findings += [Finding(k, f"h{k}", "block", "devices", f"held by {run}", held_by=run) for run in runs]
        findings += [Finding(k, f"h{k}", "block", "disk", "the disk is full")] if word == "unfit" else []
    return PreflightReport(facts, tuple(findings))


@pytest.mark.parametrize(
    ("nodes", "needed", "wait", "chosen"),
    [
        (["free", "unfit", "free", "free"], (2, 2), False, [0, 2]),
        (["free", "unfit", "free", "free"], (2, 4), False, [0, 2, 3]),
        (["a", "free", "unfit", "free"], (1, 4), False, [1, 3]),
        (["a", "free", "unfit", "b"], (2, 4), False, []),
        (["a", "free", "unfit", "b"], (2, 4), True, [1, 3]),  # b ends, the end of a is unknown
        (["b X", "free", "c", "b"], (2, 4), True, [1, 3]),
        (["b X", "free", "c", "c"], (3, 4), True, [1, 2, 3]),
        (["b X Y", "b X", "unfit", "b X Y"], (2, 2), True, [0, 1]),
        (["free", "unfit", "unfit", "b"], (3, 4), True, []),
    ],
)
def test_the_first_hosts_that_are_free_are_chosen(
    nodes: list[str], needed: tuple[int, int], wait: bool, chosen: list[int]
) -> None:
    found, left_out = chosen_nodes(report_of(nodes, b=50.0, c=60.0), len(nodes), *needed, wait=wait)
    assert found == chosen
    assert {one.node_rank for one in left_out} == {
        k for k, word in enumerate(nodes) if word != "free" and k not in chosen
    }


@pytest.mark.parametrize(("text", "numbers"), [("2", (2, 2)), ("2-4", (2, 4)), ("1-9", (1, 9))])
def test_numbers_of_hosts(text: str, numbers: tuple[int, int]) -> None:
    assert numbers_needed(text, 4) == numbers


@pytest.mark.parametrize("text", ["0", "3-2", "x", "-1", "2-", "5", "5-9"])
def test_other_numbers_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--nodes-needed {text}: "):
        numbers_needed(text, 4)
