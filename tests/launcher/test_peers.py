"""Tests of the connections between the hub and the members of a run: admission, clock offsets and causes."""

from __future__ import annotations

import errno
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.node.child_process import Loop
from launcher.node.peers import link
from launcher.node.peers import member as member_module
from launcher.node.peers.hub import Hub, listen
from launcher.node.peers.link import proof
from launcher.node.peers.member import ClockOffset, Member
from launcher.node.peers.model import first_cause, make_cause, received_cause, sentence
from launcher.node.spec import NodeSpec, RunNode
from ports import free_port
from waiting import stretched

IDLE = {
    "state": "training",
    "trained": False,
    "final": None,
    "cause": None,
    "ranks": {},
    "findings": [],
    "stacks": None,
    "own_ranks": [],
}
RANK = {"kind": "step", "t": 5.0, "ended": False, "epoch": 1}
UNKNOWN = dict.fromkeys(
    ("at", "step", "steps", "loss", "seeds_per_s", "remote_share", "own_s", "step_s", "batch_s", "idle_s")
)  #: fields of a rank that has not reported them
TOKEN = "5ecret"
LABELS = ("node0 (a)", "node1 (b)", "node2 (c)")


class Room:
    """A hub and members that connect to it, all driven by one event loop."""

    def __init__(self, **more: Any) -> None:
        self.loop = Loop()
        self.port = free_port()
        self.settings = {"start_timeout": 5.0, "peer_timeout": 3.0, **more}
        self.hub = Hub(self.meeting(0), self.loop)
        self.hub.open()
        self.hub.report(IDLE)
        self.members: list[Member] = []

    def meeting(self, k: int, token: str = TOKEN) -> NodeSpec:
        nodes = tuple(RunNode(label, "worker", (), (), "127.0.0.1", "127.0.0.1", self.port) for label in LABELS)
        return NodeSpec("r1", token, k, "", nodes, None, None, grace=1.0, **self.settings)

    def member(self, k: int, *, clock: Callable[[], float] = time.time, token: str = TOKEN) -> Member:
        member = Member(self.meeting(k, token), self.loop, clock)
        member.open()
        member.report(IDLE)
        self.members.append(member)
        return member

    def until(self, true: Callable[[], Any], timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < deadline
            self.turn()

    def turn(self) -> None:
        self.loop.poll(0.02)
        everyone: list[Hub | Member] = [self.hub, *self.members]
        for peers in everyone:
            peers.look()

    def stranger(self, *lines: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), 5)
        for line in lines:
            sock.sendall(line)
        return sock

    def close(self) -> None:
        everyone: list[Hub | Member] = [self.hub, *self.members]
        for peers in everyone:
            peers.close()


@pytest.fixture
def room() -> Iterator[Room]:
    old = signal.getsignal(signal.SIGCHLD)
    made = Room()
    yield made
    made.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, old)


# Admission


def test_hub_and_member_exchange_their_states(room: Room) -> None:
    member = room.member(2)
    member.report({**IDLE, "ranks": {"3": RANK}})
    room.until(lambda: member.offset is not None and room.hub.members[2].ranks)
    assert room.hub.members[2].ranks == {"3": {**RANK, **UNKNOWN}} and abs(member.offset or 0) < 0.5
    assert room.hub.table["2"]["state"] == "training" and room.hub.table["1"] == {"state": "absent", "age": None}
    assert member.table["0"]["state"] == "training" and "2" not in member.table


def test_the_token_never_travels_and_is_needed_on_both_sides(room: Room) -> None:
    thief = room.member(1, token="guess")
    room.until(lambda: room.hub.dropped.get("could not prove to belong to this run", 0) > 0)
    assert room.hub.members[1].link is None and room.hub.members[1].heard is None and thief.offset is None


def test_a_hub_without_the_token_is_rejected() -> None:
    # A program that listens on the port of the hub does not know the token of the run. The member does not trust it,
    # and reports that it could not connect.
    room = Room(start_timeout=0.8)
    room.hub.close()
    false = listen("127.0.0.1", room.port)
    member = room.member(1)
    with false:
        false.setblocking(True)
        sock = false.accept()[0]
        sock.sendall(json.dumps({"hello": "x"}).encode() + b"\n")
        room.until(lambda: member._link is not None)
        sock.sendall(json.dumps({"proof": "y" * 64}).encode() + b"\n")
        room.until(lambda: bool(member.lost))
    assert "within 0.8 s (run.start_timeout)" in member.lost["0"]["why"]
    member.close()


def test_a_reflected_proof_is_rejected(room: Room) -> None:
    # The proof with which a hub shows that it knows the token is not valid as the proof of a member.
    sock = room.stranger()
    room.until(lambda: room.hub._strangers)
    nonce = json.loads(sock.recv(1000))["hello"]
    shown = proof(TOKEN, "hub", 1, nonce, "n")
    sock.sendall(json.dumps({"node_rank": 1, "nonce": "n", "proof": shown}).encode() + b"\n")
    room.until(lambda: room.hub.dropped)
    assert set(room.hub.dropped) == {"could not prove to belong to this run"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "invalid message"),
        (b"[1]\n", "invalid message"),
        (b'{"node_rank": "x"}\n', "invalid message"),
        (b'{"node_rank": 7, "nonce": "", "proof": ""}\n', "could not prove"),
        (b"x" * 5000, "a line of more than 1024 bytes"),
        (b"\x80\xff\n", "invalid message"),
        (b"[" * 900 + b"\n", "invalid message"),
        (b'{"node_rank": Infinity, "nonce": "", "proof": ""}\n', "invalid message"),
    ],
)
def test_strangers_are_dropped_and_counted(room: Room, line: bytes, why: str) -> None:
    sock = room.stranger(line)
    room.until(lambda: room.hub.dropped)
    assert next(iter(room.hub.dropped)).startswith(why)
    sock.settimeout(5)
    while sock.recv(1000):
        pass
    member = room.member(1)
    room.until(lambda: member.offset is not None)


def test_many_strangers_cannot_keep_a_member_out(room: Room) -> None:
    strangers = [room.stranger() for _ in range(100)]
    room.until(lambda: len(room.hub._strangers) == 64 and room.hub.dropped)
    member = room.member(1)
    room.until(lambda: member.offset is not None)
    assert len(room.hub._strangers) <= 64
    for sock in strangers:
        sock.close()


def test_rejected_connections_leak_no_file_descriptors(room: Room) -> None:
    gc.collect()  # else files of earlier tests may be closed meanwhile
    files = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        room.stranger(b'{"node_rank": "%d"}\n' % number).close()
    room.until(lambda: sum(room.hub.dropped.values()) == 50)
    assert len(room.hub.dropped) < 5 and len(os.listdir("/proc/self/fd")) == files


def test_a_hub_without_a_free_descriptor_does_not_spin(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def accept(sock: socket.socket) -> Any:
        nonlocal calls
        calls += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", accept)
        member = room.member(1)
        room.until(lambda: calls, 60.0)
        seen, since = calls, time.monotonic()
        while time.monotonic() - since < 1.0:
            room.turn()
        assert calls - seen <= 2 * (time.monotonic() - since) + 2
    room.until(lambda: member.offset is not None, 60.0)


def test_a_member_that_sends_invalid_messages_is_dropped_and_may_reconnect(room: Room) -> None:
    member = room.member(1)
    room.until(lambda: member.offset is not None)
    assert member._link is not None
    member._link.send({"t": "yesterday"})
    room.until(lambda: room.hub.members[1].link is None)
    room.until(lambda: room.hub.members[1].link is not None)
    assert not room.hub.lost


def test_a_slow_hub_does_not_declare_a_member_lost(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    # A member that hears nothing from the hub connects again. It closes the old connection only after the hub has
    # accepted the new one, because the hub declares a member lost when its connection closes.
    monkeypatch.setattr(member_module, "_SILENT", 0.2)
    room.settings["peer_timeout"] = 30.0
    member = room.member(1)
    room.until(lambda: member.offset is not None)
    known = room.hub.members[1]
    with monkeypatch.context() as deaf:
        deaf.setattr(room.hub, "_accept", lambda _: None)
        room.loop.unwatch(room.hub._listener)  # type: ignore[arg-type]
        first = member._link
        room.until(lambda: member._link is not first)
        for _ in range(30):
            room.turn()
        assert known.gone is None and known.link is not None
    assert room.hub._listener is not None
    room.loop.watch(room.hub._listener, selectors.EVENT_READ, room.hub._accept)
    room.until(lambda: member._link is not None and member._link.node_rank == 0)
    assert member._silent is None and known.gone is None and not room.hub.lost


def test_a_pause_of_the_hub_does_not_count_as_silence_of_members(room: Room) -> None:
    member = room.member(1)
    room.until(lambda: member.offset is not None)
    known = room.hub.members[1]
    known.heard, room.hub._looked = time.monotonic() - 8, time.monotonic() - 8
    room.hub.look()
    assert not room.hub.lost and 0 <= room.hub.table["1"]["age"] < 1
    known.heard, room.hub._looked = (
        time.monotonic(),
        time.monotonic() - 8,
    )  # messages that arrived during the pause have been read
    room.hub.look()
    assert room.hub.table["1"]["age"] >= 0


def test_a_member_that_reads_nothing_never_blocks_the_hub(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_UNSENT", 1 << 16)
    slow, quick = room.member(1), room.member(2)
    room.until(lambda: slow.offset is not None and quick.offset is not None)
    room.members.remove(slow)
    assert slow._link is not None
    room.loop.unwatch(slow._link._sock)
    began = time.monotonic()
    for k in range(100):
        cause = make_cause(2, "rank2", "failure", "x" * 2000, 1e9 - k)
        room.hub.report({**IDLE, "cause": cause})
    for _ in range(20):
        room.turn()
    assert time.monotonic() - began < stretched(2) and quick.order is not None


# Clocks


def test_clocks_minutes_apart(room: Room) -> None:
    member = room.member(1, clock=lambda: time.time() + 300)
    room.until(lambda: member.offset is not None)
    assert abs((member.offset or 0) - 300) < 0.01
    happened = time.time()
    cause = make_cause(1, "rank5", "failure", "raised X", happened + 300)
    member.report({**IDLE, "cause": cause})
    room.until(lambda: room.hub.order is not None)
    assert room.hub.cause is not None and abs(room.hub.cause["t"] - happened) < 0.01


def test_the_offset_of_the_quickest_round_trip_is_used() -> None:
    offset = ClockOffset()
    assert offset.value is None
    offset.add(100.0, 50.9, 50.9, 101.0)  # 1 s of travel time, nearly all of it outbound
    assert offset.value == pytest.approx(49.6)
    offset.add(200.0, 150.001, 150.001, 200.002)
    offset.add(300.0, 250.3, 250.3, 300.5)
    assert offset.value == pytest.approx(50.0)


def test_a_change_of_the_clock_is_detected() -> None:
    offset = ClockOffset()
    offset.add(100.0, 50.001, 50.001, 100.002)
    offset.add(50.0, 0.5, 0.6, 10.0)  # clock set back during a round trip: ignored
    assert offset.value == pytest.approx(50.0)
    offset.add(200.0, 190.1, 190.1, 200.2)
    assert offset.value == pytest.approx(10.0)


# Causes


def test_the_earlier_cause_wins_if_it_is_reported_later(room: Room) -> None:
    one, two = room.member(1), room.member(2)
    room.until(lambda: one.offset is not None and two.offset is not None)
    now = time.time()
    two.report({**IDLE, "cause": make_cause(2, "rank2", "failure", "lost its peer", now)})
    room.until(lambda: one.order is not None)
    one.report({**IDLE, "cause": make_cause(1, "rank1", "failure", "out of memory", now - 0.5)})
    room.until(lambda: two.cause is not None and two.cause["reason"] == "out of memory")
    assert room.hub.cause is not None and room.hub.cause["name"] == "rank1" and two.order is not None


def test_the_run_ends_when_all_ranks_have_trained(room: Room) -> None:
    one, two = room.member(1), room.member(2)
    room.until(lambda: one.offset is not None and two.offset is not None)
    one.report({**IDLE, "trained": True})
    two.report({**IDLE, "trained": None})
    room.until(lambda: room.hub.members[1].trained)
    assert room.hub.order is None
    room.hub.report({**IDLE, "trained": True})
    room.until(lambda: one.order is not None and two.order is not None)
    assert one.order is not None and one.order.cause is None and not room.hub.may_leave()
    for member in (one, two):
        member.report({**IDLE, "trained": True, "final": "done"})
    room.until(lambda: room.hub.may_leave() and one.may_leave() and two.may_leave())


@pytest.mark.parametrize(("final", "lost"), [("done", False), ("failed", True), ("stopped", True)])
def test_a_member_that_ends_before_an_order_was_lost_unless_it_is_done(room: Room, final: str, lost: bool) -> None:
    # A node that only trains is done with its ranks, perhaps before the rank of this hub is.
    member = room.member(1)
    room.until(lambda: member.offset is not None)
    member.report({**IDLE, "trained": True, "final": final})
    room.until(lambda: room.hub.members[1].final)
    assert (room.hub.cause is not None) == lost and (room.hub.order is not None) == lost


def test_sentences_of_causes() -> None:
    causes = [
        make_cause(1, "rank5", "failure", "ended with exit status 3", 0),
        make_cause(2, "server", "failure", "ended while it was needed", 0),
        make_cause(2, "node", "lost", "no sign of life", 0),
        make_cause(
            0, "node", "stop", "stop requested by alice@laptop (Ctrl-C)", 0, {"by": "alice@laptop", "why": "Ctrl-C"}
        ),
        make_cause(1, "rank5", "nan", "the loss of rank 5 is NaN", 0),
    ]
    assert [sentence(cause, LABELS) for cause in causes] == [
        "rank 5 on node1 (b) ended with exit status 3",
        "server of node2 (c) ended while it was needed",
        "node2 (c): no sign of life",
        "stop requested by alice@laptop (Ctrl-C), on node0 (a)",
        "the loss of rank 5 is NaN",
    ]
    assert received_cause(json.loads(json.dumps(causes[3])), 0, len(LABELS)) == causes[3]
    with pytest.raises(ValueError, match="no node 3"):
        received_cause({**causes[3], "node_rank": len(LABELS)}, 0, len(LABELS))
    assert first_cause(None, causes[0]) is causes[0] and first_cause(None, None) is None


def test_which_cause_comes_first() -> None:
    failed = make_cause(0, "rank0", "failure", "ended with exit status 3", 10.0)
    lost = make_cause(2, "node", "lost", "no sign of life", 12.0)
    assert first_cause(failed, {**failed, "t": 9.0}) == {**failed, "t": 9.0}
    assert first_cause(failed, lost) is lost, "ranks notice the loss of a node before the supervisors"
    assert first_cause(failed, {**lost, "t": 14.0}) is failed
    assert first_cause({**failed, "follow_up": True}, {**lost, "t": 14.0}) == {**lost, "t": 14.0}
    asked = make_cause(0, "node", "stop", "stop requested", 11.0)
    assert first_cause(asked, lost) is asked


def test_a_hub_listens_on_all_interfaces_if_its_address_is_not_local() -> None:
    with listen("192.0.2.1", free_port()) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match=os.strerror(98)):
        listen("127.0.0.1", first.getsockname()[1])
