"""Tests of ``BatchScheduler``: fair shares, a bounded buffer, and no client that blocks the others."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from trainer.service.batch_scheduler import FORGET, MAX_CLIENTS, MAX_QUEUED, PATIENCE, BatchScheduler, ScheduledRequest
from trainer.service.fair_queue import Peer
from trainer.service.messages import ClientName

NOW = 0.0  #: timeout of ``next``: do not wait


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Driver:
    """Calls a ``BatchScheduler`` for numbered clients. By default, client k uses connection k."""

    def __init__(self, limit=1 << 40):
        self.clock = Clock()
        self.scheduler = BatchScheduler(limit, self.clock)
        self._last_id = 0

    def ask(self, client, peer=None, size=0):
        self._last_id += 1
        job = ScheduledRequest(peer_of(client if peer is None else peer), self._last_id, None, named(client), size)
        return self.scheduler.submit(job)

    def next(self):
        return self.scheduler.next(NOW)

    def make(self, nbytes):
        """Make the next batch, of ``nbytes``, and return its request. ``take`` acknowledges the batch."""
        job = self.next()
        assert job is not None
        self.scheduler.done(job, nbytes)
        return job

    def take(self, job):
        self.scheduler.acknowledge(job.peer, job.request_id)

    def teach(self, client, nbytes):
        """Let the scheduler expect batches of ``nbytes`` for a client."""
        self.ask(client)
        self.take(self.make(nbytes))

    @property
    def held(self):
        return self.scheduler.status().buffer_bytes


def named(number):
    return ClientName(number, f"client{number}")


def peer_of(number):
    return Peer("10.0.0.1", number)


def shares(sizes, rounds=4000, in_flight=4, threads=2):
    """Return the bytes that each client gets in ``rounds`` batches.

    sizes: bytes of one batch, by client. in_flight: number of batches for which each client waits at a time.
    """
    driver, served, making = Driver(), Counter(), []
    for client, nbytes in sizes.items():
        driver.teach(client, nbytes)
    for client in sizes:
        for _ in range(in_flight):
            driver.ask(client)
    for _ in range(rounds):
        making.append(driver.next())
        if len(making) < threads:
            continue
        job = making.pop(0)
        nbytes = sizes[job.client.number]
        driver.scheduler.done(job, nbytes)
        driver.take(job)
        served[job.client.number] += nbytes
        driver.ask(job.client.number)
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
def test_twenty_clients_receive_equal_bytes(sizes, in_flight) -> None:
    served = shares(sizes, in_flight=in_flight)
    mean = sum(served.values()) / len(sizes)
    assert all(abs(served[client] - mean) < 0.1 * mean for client in sizes), served


def test_a_client_with_more_connections_gets_no_more() -> None:
    driver, served = Driver(), Counter()
    for peer in range(16):
        driver.ask(1, peer=peer)
    driver.ask(2, peer=99)
    driver.ask(2, peer=98)
    for _ in range(2000):
        job = driver.make(500)
        driver.take(job)
        served[job.client.number] += 1
        driver.scheduler.submit(ScheduledRequest(job.peer, 10_000 + job.request_id, None, job.client))
    assert abs(served[1] - served[2]) <= 4


def test_a_late_client_neither_waits_nor_catches_up() -> None:
    driver, served = Driver(), Counter()
    for _ in range(1000):
        driver.ask(1)
        driver.take(driver.make(100))
    for client in (1, 2):
        for _ in range(3):
            driver.ask(client)
    for _ in range(200):
        job = driver.make(100)
        driver.take(job)
        driver.ask(job.client.number)
        served[job.client.number] += 1
    assert abs(served[1] - served[2]) <= 2


def test_failed_batches_count_towards_the_share() -> None:
    driver, served = Driver(), Counter()
    driver.teach(1, 1000)
    for client in (1, 2):
        driver.ask(client)
        driver.ask(client)
    for _ in range(100):
        job = driver.next()
        served[job.client.number] += 1
        if job.client.number == 1:
            driver.scheduler.failed(job)
        else:
            driver.scheduler.done(job, 1000)
            driver.take(job)
        driver.ask(job.client.number)
    assert abs(served[1] - served[2]) <= 3


@pytest.mark.parametrize("seed", range(5))
def test_the_buffer_stays_within_its_limit_and_every_client_is_served(seed) -> None:
    rng, limit = random.Random(seed), 10_000
    sizes = {client: rng.choice([50, 400, 1500, 4000]) for client in range(12)}
    driver, making, sent, served = Driver(limit), [], [], Counter()
    for client, size in sizes.items():
        driver.teach(client, size)
        for peer in range(3):
            driver.ask(client, peer=100 * client + peer)
    for _ in range(6000):
        driver.clock.now += 0.01
        act = rng.random()
        if act < 0.5 and len(making) < 4 and (job := driver.next()):
            making.append(job)
        elif act < 0.8 and making:
            job = making.pop(rng.randrange(len(making)))
            assert driver.scheduler.done(job, sizes[job.client.number])
            sent.append(job)
        elif sent:
            job = sent.pop(rng.randrange(len(sent)))
            driver.take(job)
            served[job.client.number] += 1
            driver.ask(job.client.number, peer=job.peer.number)
        assert driver.held <= limit
    assert len(served) == len(sizes)


def test_a_batch_larger_than_the_buffer_is_made_alone() -> None:
    driver = Driver(limit=1000)
    driver.teach(1, 5000)
    driver.teach(2, 100)
    driver.ask(2)
    small = driver.make(100)
    driver.ask(1)
    assert driver.next() is None
    driver.take(small)
    large = driver.make(5000)
    assert driver.held == 5000
    driver.ask(2)
    assert driver.next() is None
    driver.take(large)
    assert driver.next().client.number == 2


def test_batches_are_made_one_by_one_until_their_size_is_known() -> None:
    driver = Driver(limit=1000)
    driver.ask(1)
    driver.ask(2)
    first = driver.next()
    assert driver.next() is None
    driver.scheduler.done(first, 300)
    assert driver.next().client.number == 2 and driver.held == 600


def test_a_client_that_reads_no_replies_leaves_room_for_others() -> None:
    driver = Driver(limit=1000)
    driver.teach(1, 100)
    driver.teach(2, 100)
    for peer in range(100, 120):
        driver.ask(1, peer=peer)
    while driver.next() is not None:
        pass
    assert 300 <= driver.held <= 500
    for _ in range(200):
        driver.ask(2)
        job = driver.make(100)
        assert job.client.number == 2
        driver.take(job)


def test_other_clients_wait_a_limited_time_for_a_batch_that_needs_room() -> None:
    driver = Driver(limit=1000)
    driver.teach(1, 600)
    for client in (2, 2, 3):
        driver.teach(client, 100)
    held = []
    for peer in range(100, 105):
        driver.ask(2, peer=peer)
        held.append(driver.make(100))
    driver.ask(1)
    driver.ask(2)
    assert driver.next() is None
    driver.clock.now += PATIENCE - 0.1
    assert driver.next() is None
    driver.clock.now += 0.2
    assert driver.next() is None  # client 2 occupies half of the buffer
    driver.ask(3)
    assert driver.next().client.number == 3
    for job in held[:4]:
        driver.take(job)
    assert driver.next().client.number == 1


def test_the_next_request_of_a_connection_acknowledges_its_last_reply() -> None:
    driver = Driver(limit=1000)
    driver.teach(1, 100)
    driver.ask(1, peer=5)
    driver.make(100)
    assert driver.held == 100
    driver.ask(1, peer=6)
    assert driver.held == 100
    driver.ask(1, peer=5)
    assert driver.held == 0


def test_acknowledgements_with_foreign_or_unknown_ids_are_ignored() -> None:
    driver = Driver()
    driver.ask(1)
    job = driver.make(100)
    driver.scheduler.acknowledge(peer_of(2), job.request_id)
    driver.scheduler.acknowledge(job.peer, 4711)
    assert driver.held == 100
    driver.take(job)
    driver.take(job)
    assert driver.held == 0


def test_a_closed_connection_frees_its_batches() -> None:
    driver = Driver()
    for _ in range(4):
        driver.ask(1)
    driver.ask(1, peer=2)
    driver.ask(3)
    sent = driver.make(100)
    making = next(job for job in iter(driver.next, None) if job.peer == peer_of(1))
    assert sorted(driver.scheduler.peers()) == [peer_of(1), peer_of(2), peer_of(3)]
    driver.scheduler.connection_closed(peer_of(1))
    assert peer_of(1) not in driver.scheduler.peers()
    assert not driver.scheduler.done(making, 100)
    left = {job.peer for job in iter(driver.next, None)}
    assert left <= {peer_of(2), peer_of(3)} and sent.peer == peer_of(1)
    driver.scheduler.connection_closed(peer_of(2))
    driver.scheduler.connection_closed(peer_of(3))
    driver.scheduler.connection_closed(Peer("10.0.0.9", 0))
    assert driver.scheduler.peers() == [] and driver.scheduler.status().queue == 0


def test_queues_are_limited() -> None:
    driver = Driver()
    assert [driver.ask(1) for _ in range(MAX_QUEUED)] == [None] * MAX_QUEUED
    assert "64 batches of this client (client1) are already waiting" in driver.ask(1)
    assert driver.ask(2) is None
    assert driver.ask(2, size=100 << 20) is not None
    assert "as another client" in driver.ask(3, peer=2)
    beside = [driver.scheduler.submit(ScheduledRequest(Peer("h", 0), k, None)) for k in range(MAX_QUEUED + 1)]
    assert beside[:-1] == [None] * MAX_QUEUED and "are already waiting" in beside[-1]


def test_the_number_of_remembered_clients_is_bounded() -> None:
    driver = Driver()
    for client in range(3 * MAX_CLIENTS):
        driver.ask(client, peer=client % 7)
        driver.take(driver.make(10))
    assert len(driver.scheduler.status().clients) == MAX_CLIENTS
    driver.clock.now += FORGET + 1
    assert driver.scheduler.status().clients == ()


def test_other_requests_and_batches_take_turns() -> None:
    driver = Driver()
    driver.teach(1, 100)
    for number in range(4):
        driver.ask(1)
        driver.scheduler.submit(ScheduledRequest(Peer("h", number % 2), number, None))
    order = [job.client is None for job in iter(driver.next, None)]
    assert order in ([True, False] * 4, [False, True] * 4)
    assert {Peer("h", 0), Peer("h", 1)} < set(driver.scheduler.peers())


def test_status_reports_queues_buffer_and_clients() -> None:
    driver = Driver(limit=1000)
    driver.teach(1, 100)
    driver.ask(1)
    driver.ask(1)
    driver.make(150)
    driver.clock.now += 5
    status = driver.scheduler.status()
    assert (status.queue, status.buffer_bytes, status.buffer_limit, status.batches) == (1, 150, 1000, 2)
    (client,) = status.clients
    assert (client.name, client.queue, client.buffer_bytes, client.batches, client.bytes) == ("client1", 1, 150, 2, 250)
    assert client.seconds_since == 5


def test_no_wakeup_is_lost() -> None:
    scheduler = BatchScheduler(1000)
    made, lock = Counter(), threading.Lock()

    def work() -> None:
        while (job := scheduler.next(30)) is not None:
            if scheduler.done(job, 400):
                with lock:
                    made[job.client.number] += 1
                scheduler.acknowledge(job.peer, job.request_id)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for number in range(600):
        until = time.monotonic() + 5
        while scheduler.submit(ScheduledRequest(Peer("h", number % 9), number, None, named(number % 3))):
            assert time.monotonic() < until
            time.sleep(0.001)
    until = time.monotonic() + 10
    while sum(made.values()) < 600 and time.monotonic() < until:
        time.sleep(0.005)
    assert made == Counter({0: 200, 1: 200, 2: 200})
    scheduler.close()
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()
