"""Hosts and their connections take turns, and one that is held up costs the others nothing."""

from __future__ import annotations

from trainer.service.fair_queue import BlockingFairQueue, FairQueue, Peer

A, B, C = (Peer(f"10.0.0.{number}", number) for number in range(3))


def given(turns: FairQueue[int]) -> list[int]:
    found = []
    while (item := turns.pop()) is not None:
        found.append(item)
    return found


def test_a_host_gets_no_more_by_more_connections() -> None:
    turns: FairQueue[int] = FairQueue()
    for number in range(4):
        for _ in range(2):
            turns.push(Peer("many", number), number)
    for _ in range(4):
        turns.push(Peer("one", 9), 9)
    assert given(turns) == [0, 9, 1, 9, 2, 9, 3, 9, 0, 1, 2, 3]


def test_connections_take_turns() -> None:
    turns: FairQueue[int] = FairQueue()
    for item in (10, 11, 12):
        turns.push(A, item)
    turns.push(B, 20)
    turns.push(C, 30)
    assert len(turns) == 5 and turns.of(A) == 3
    assert given(turns) == [10, 20, 30, 11, 12] and len(turns) == 0


def test_items_of_a_held_connection_wait_and_count_for_nothing() -> None:
    turns: FairQueue[int] = FairQueue()
    turns.push(A, 10)
    turns.pause(A)
    turns.pause(A)
    turns.push(A, 11)
    turns.push(B, 20)
    assert (len(turns), turns.of(A), sorted(turns.peers())) == (1, 2, [A, B])
    assert given(turns) == [20]
    turns.resume(A)
    turns.push(A, 12)
    assert given(turns) == [10, 11, 12]


def test_what_is_dropped_is_held_no_longer() -> None:
    turns: FairQueue[int] = FairQueue()
    turns.pause(A)
    turns.push(A, 10)
    turns.drop(A)
    turns.push(A, 11)
    assert given(turns) == [11] and turns.peers() == []


def test_threads_wait_for_items_that_are_let_go() -> None:
    turns: BlockingFairQueue[int] = BlockingFairQueue()
    turns.pause(A)
    turns.put(A, 10)
    assert len(turns) == 0 and turns.of(A) == 1
    turns.resume(A)
    assert turns.get() == 10
    turns.close()
    assert turns.get() is None
