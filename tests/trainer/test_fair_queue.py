"""Tests of ``FairQueue``: hosts and their connections take turns, and a paused connection does not delay others."""

from __future__ import annotations

from trainer.service.fair_queue import BlockingFairQueue, FairQueue, Peer

A, B, C = (Peer(f"10.0.0.{number}", number) for number in range(3))


def given(queue: FairQueue[int]) -> list[int]:
    found = []
    while (item := queue.pop()) is not None:
        found.append(item)
    return found


def test_a_host_gets_no_more_by_more_connections() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(4):
        for _ in range(2):
            queue.push(Peer("many", number), number)
    for _ in range(4):
        queue.push(Peer("one", 9), 9)
    assert given(queue) == [0, 9, 1, 9, 2, 9, 3, 9, 0, 1, 2, 3]


def test_connections_take_turns() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in (10, 11, 12):
        queue.push(A, item)
    queue.push(B, 20)
    queue.push(C, 30)
    assert len(queue) == 5 and queue.of(A) == 3
    assert given(queue) == [10, 20, 30, 11, 12] and len(queue) == 0


def test_items_of_a_paused_connection_wait_and_are_not_counted() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push(A, 10)
    queue.pause(A)
    queue.pause(A)
    queue.push(A, 11)
    queue.push(B, 20)
    assert (len(queue), queue.of(A), sorted(queue.peers())) == (1, 2, [A, B])
    assert given(queue) == [20]
    queue.resume(A)
    queue.push(A, 12)
    assert given(queue) == [10, 11, 12]


def test_dropping_a_connection_ends_its_pause() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.pause(A)
    queue.push(A, 10)
    queue.drop(A)
    queue.push(A, 11)
    assert given(queue) == [11] and queue.peers() == []


def test_threads_receive_items_of_resumed_connections() -> None:
    queue: BlockingFairQueue[int] = BlockingFairQueue()
    queue.pause(A)
    queue.put(A, 10)
    assert len(queue) == 0 and queue.of(A) == 1
    queue.resume(A)
    assert queue.get() == 10
    queue.close()
    assert queue.get() is None
