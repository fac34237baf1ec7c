"""Clients share a server fairly, its buffer stays within the bound, and nobody can hold up the others for ever."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from trainer.service.batch_scheduler import FORGET, MAX_CLIENTS, MAX_QUEUED, PATIENCE, BatchScheduler, ScheduledRequest
from trainer.service.fair_queue import Peer
from trainer.service.wire.messages import ClientName

NOW = 0.0  #: a ``next`` that does not wait


class Clock:
    """Time that passes only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Desk:
    """A desk with clients that ask by number; peer and client have the same number unless told."""

    def __init__(self, limit=1 << 40):
        self.clock = Clock()
        self.desk = BatchScheduler(limit, self.clock)
        self._last_id = 0

    def ask(self, client, peer=None, size=0):
        self._last_id += 1
        job = ScheduledRequest(peer_of(client if peer is None else peer), self._last_id, None, named(client), size)
        return self.desk.submit(job)

    def next(self):
        return self.desk.next(NOW)

    def make(self, nbytes):
        """The next batch, made but not taken."""
        job = self.next()
        assert job is not None
        self.desk.done(job, nbytes)
        return job

    def take(self, job):
        self.desk.taken(job.peer, job.request_id)

    def teach(self, client, nbytes):
        """Let the desk know how large a client's batches are."""
        self.ask(client)
        self.take(self.make(nbytes))

    @property
    def held(self):
        return self.desk.status().buffer_bytes


def named(number):
    return ClientName(number, f"client{number}")


def peer_of(number):
    return Peer("10.0.0.1", number)


def shares(sizes, rounds=4000, in_flight=4, threads=2):
    """Bytes that each client had after so many batches, all asking again at once."""
    desk, served, making = Desk(), Counter(), []
    for client, nbytes in sizes.items():
        desk.teach(client, nbytes)
    for client in sizes:
        for _ in range(in_flight):
            desk.ask(client)
    for _ in range(rounds):
        making.append(desk.next())
        if len(making) < threads:
            continue
        job = making.pop(0)
        nbytes = sizes[job.client.number]
        desk.desk.done(job, nbytes)
        desk.take(job)
        served[job.client.number] += nbytes
        desk.ask(job.client.number)
    return served


@pytest.mark.parametrize(
    "sizes",
    [
        dict.fromkeys(range(20), 1000),
        {client: 200 * (1 + client) for client in range(20)},
        {client: 10_000 if client else 100 for client in range(20)},
    ],
    ids=["equal", "unequal", "one small"],
)
@pytest.mark.parametrize("in_flight", [2, 8])
def test_twenty_clients_have_equal_bytes(sizes, in_flight) -> None:
    served = shares(sizes, in_flight=in_flight)
    mean = sum(served.values()) / len(sizes)
    assert all(abs(served[client] - mean) < 0.1 * mean for client in sizes), served


def test_a_client_with_more_connections_gets_no_more() -> None:
    desk, served = Desk(), Counter()
    for peer in range(16):
        desk.ask(1, peer=peer)
    desk.ask(2, peer=99)
    desk.ask(2, peer=98)
    for _ in range(2000):
        job = desk.make(500)
        desk.take(job)
        served[job.client.number] += 1
        desk.desk.submit(ScheduledRequest(job.peer, 10_000 + job.request_id, None, job.client))
    assert abs(served[1] - served[2]) <= 4


def test_one_who_comes_later_neither_waits_nor_catches_up() -> None:
    desk, served = Desk(), Counter()
    for _ in range(1000):
        desk.ask(1)
        desk.take(desk.make(100))
    for client in (1, 2):
        for _ in range(3):
            desk.ask(client)
    for _ in range(200):
        job = desk.make(100)
        desk.take(job)
        desk.ask(job.client.number)
        served[job.client.number] += 1
    assert abs(served[1] - served[2]) <= 2


def test_failing_batches_are_not_free() -> None:
    desk, served = Desk(), Counter()
    desk.teach(1, 1000)
    for client in (1, 2):
        desk.ask(client)
        desk.ask(client)
    for _ in range(100):
        job = desk.next()
        served[job.client.number] += 1
        if job.client.number == 1:
            desk.desk.failed(job)
        else:
            desk.desk.done(job, 1000)
            desk.take(job)
        desk.ask(job.client.number)
    assert abs(served[1] - served[2]) <= 3


@pytest.mark.parametrize("seed", range(5))
def test_the_buffer_never_passes_its_bound_and_everybody_is_served(seed) -> None:
    rng, limit = random.Random(seed), 10_000
    sizes = {client: rng.choice([50, 400, 1500, 4000]) for client in range(12)}
    desk, making, sent, served = Desk(limit), [], [], Counter()
    for client, size in sizes.items():
        desk.teach(client, size)
        for peer in range(3):
            desk.ask(client, peer=100 * client + peer)
    for _ in range(6000):
        desk.clock.now += 0.01
        act = rng.random()
        if act < 0.5 and len(making) < 4 and (job := desk.next()):
            making.append(job)
        elif act < 0.8 and making:
            job = making.pop(rng.randrange(len(making)))
            assert desk.desk.done(job, sizes[job.client.number])
            sent.append(job)
        elif sent:
            job = sent.pop(rng.randrange(len(sent)))
            desk.take(job)
            served[job.client.number] += 1
            desk.ask(job.client.number, peer=job.peer.number)
        assert desk.held <= limit
    assert len(served) == len(sizes)


def test_a_batch_larger_than_the_bound_comes_alone() -> None:
    desk = Desk(limit=1000)
    desk.teach(1, 5000)
    desk.teach(2, 100)
    desk.ask(2)
    small = desk.make(100)
    desk.ask(1)
    assert desk.next() is None
    desk.take(small)
    large = desk.make(5000)
    assert desk.held == 5000
    desk.ask(2)
    assert desk.next() is None
    desk.take(large)
    assert desk.next().client.number == 2


def test_as_long_as_nothing_is_known_batches_are_made_one_by_one() -> None:
    desk = Desk(limit=1000)
    desk.ask(1)
    desk.ask(2)
    first = desk.next()
    assert desk.next() is None
    desk.desk.done(first, 300)
    assert desk.next().client.number == 2 and desk.held == 600


def test_one_that_never_takes_its_replies_leaves_room_for_others() -> None:
    desk = Desk(limit=1000)
    desk.teach(1, 100)
    desk.teach(2, 100)
    for peer in range(100, 120):
        desk.ask(1, peer=peer)
    while desk.next() is not None:
        pass
    assert 300 <= desk.held <= 500
    for _ in range(200):
        desk.ask(2)
        job = desk.make(100)
        assert job.client.number == 2
        desk.take(job)


def test_the_others_wait_a_while_for_one_whose_batch_needs_room_and_then_go_on() -> None:
    desk = Desk(limit=1000)
    desk.teach(1, 600)
    for client in (2, 2, 3):
        desk.teach(client, 100)
    held = []
    for peer in range(100, 105):
        desk.ask(2, peer=peer)
        held.append(desk.make(100))
    desk.ask(1)
    desk.ask(2)
    assert desk.next() is None
    desk.clock.now += PATIENCE - 0.1
    assert desk.next() is None
    desk.clock.now += 0.2
    assert desk.next() is None  # the second holds half of the buffer
    desk.ask(3)
    assert desk.next().client.number == 3
    for job in held[:4]:
        desk.take(job)
    assert desk.next().client.number == 1


def test_the_next_request_of_a_connection_says_that_the_last_reply_came() -> None:
    desk = Desk(limit=1000)
    desk.teach(1, 100)
    desk.ask(1, peer=5)
    desk.make(100)
    assert desk.held == 100
    desk.ask(1, peer=6)
    assert desk.held == 100
    desk.ask(1, peer=5)
    assert desk.held == 0


def test_foreign_and_unknown_ids_are_not_taken_for_taken() -> None:
    desk = Desk()
    desk.ask(1)
    job = desk.make(100)
    desk.desk.taken(peer_of(2), job.request_id)
    desk.desk.taken(job.peer, 4711)
    assert desk.held == 100
    desk.take(job)
    desk.take(job)
    assert desk.held == 0


def test_a_connection_that_ends_frees_all_it_had() -> None:
    desk = Desk()
    for _ in range(4):
        desk.ask(1)
    desk.ask(1, peer=2)
    desk.ask(3)
    sent = desk.make(100)
    making = next(job for job in iter(desk.next, None) if job.peer == peer_of(1))
    assert sorted(desk.desk.peers()) == [peer_of(1), peer_of(2), peer_of(3)]
    desk.desk.gone(peer_of(1))
    assert peer_of(1) not in desk.desk.peers()
    assert not desk.desk.done(making, 100)
    left = {job.peer for job in iter(desk.next, None)}
    assert left <= {peer_of(2), peer_of(3)} and sent.peer == peer_of(1)
    desk.desk.gone(peer_of(2))
    desk.desk.gone(peer_of(3))
    desk.desk.gone(Peer("10.0.0.9", 0))
    assert desk.desk.peers() == [] and desk.desk.status().queue == 0


def test_queues_are_limited() -> None:
    desk = Desk()
    assert [desk.ask(1) for _ in range(MAX_QUEUED)] == [None] * MAX_QUEUED
    assert "64 batches of this client (client1) are already waiting" in desk.ask(1)
    assert desk.ask(2) is None
    assert desk.ask(2, size=100 << 20) is not None
    assert "as another client" in desk.ask(3, peer=2)
    beside = [desk.desk.submit(ScheduledRequest(Peer("h", 0), k, None)) for k in range(MAX_QUEUED + 1)]
    assert beside[:-1] == [None] * MAX_QUEUED and "are already waiting" in beside[-1]


def test_made_up_clients_cost_nothing() -> None:
    desk = Desk()
    for client in range(3 * MAX_CLIENTS):
        desk.ask(client, peer=client % 7)
        desk.take(desk.make(10))
    assert len(desk.desk.status().clients) == MAX_CLIENTS
    desk.clock.now += FORGET + 1
    assert desk.desk.status().clients == ()


def test_other_requests_and_batches_take_turns() -> None:
    desk = Desk()
    desk.teach(1, 100)
    for number in range(4):
        desk.ask(1)
        desk.desk.submit(ScheduledRequest(Peer("h", number % 2), number, None))
    order = [job.client is None for job in iter(desk.next, None)]
    assert order in ([True, False] * 4, [False, True] * 4)
    assert {Peer("h", 0), Peer("h", 1)} < set(desk.desk.peers())


def test_status_tells_what_is_going_on() -> None:
    desk = Desk(limit=1000)
    desk.teach(1, 100)
    desk.ask(1)
    desk.ask(1)
    desk.make(150)
    desk.clock.now += 5
    status = desk.desk.status()
    assert (status.queue, status.buffer_bytes, status.buffer_limit, status.batches) == (1, 150, 1000, 2)
    (client,) = status.clients
    assert (client.name, client.queue, client.buffer_bytes, client.batches, client.bytes) == ("client1", 1, 150, 2, 250)
    assert client.seconds_since == 5


def test_no_wakeup_is_lost() -> None:
    """Threads that wait long see every change that lets them start."""
    desk = BatchScheduler(1000)
    made, lock = Counter(), threading.Lock()

    def work() -> None:
        while (job := desk.next(30)) is not None:
            if desk.done(job, 400):
                with lock:
                    made[job.client.number] += 1
                desk.taken(job.peer, job.request_id)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for number in range(600):
        until = time.monotonic() + 5
        while desk.submit(ScheduledRequest(Peer("h", number % 9), number, None, named(number % 3))):
            assert time.monotonic() < until
            time.sleep(0.001)
    until = time.monotonic() + 10
    while sum(made.values()) < 600 and time.monotonic() < until:
        time.sleep(0.005)
    assert made == Counter({0: 200, 1: 200, 2: 200})
    desk.close()
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()
