"""Connections take turns, and one that is held up costs the others nothing."""

from __future__ import annotations

from trainer.service.batch_scheduler import BlockingFairQueue, FairQueue


def given(turns: FairQueue[int]) -> list[int]:
    found = []
    while (item := turns.pop()) is not None:
        found.append(item)
    return found


def test_connections_take_turns() -> None:
    turns: FairQueue[int] = FairQueue()
    for item in (10, 11, 12):
        turns.push(b"a", item)
    turns.push(b"b", 20)
    turns.push(b"c", 30)
    assert len(turns) == 5 and turns.of(b"a") == 3
    assert given(turns) == [10, 20, 30, 11, 12] and len(turns) == 0


def test_items_of_a_held_connection_wait_and_count_for_nothing() -> None:
    turns: FairQueue[int] = FairQueue()
    turns.push(b"a", 10)
    turns.pause(b"a")
    turns.pause(b"a")
    turns.push(b"a", 11)
    turns.push(b"b", 20)
    assert (len(turns), turns.of(b"a"), sorted(turns.peers())) == (1, 2, [b"a", b"b"])
    assert given(turns) == [20]
    turns.resume(b"a")
    turns.push(b"a", 12)
    assert given(turns) == [10, 11, 12]


def test_what_is_dropped_is_held_no_longer() -> None:
    turns: FairQueue[int] = FairQueue()
    turns.pause(b"a")
    turns.push(b"a", 10)
    turns.drop(b"a")
    turns.push(b"a", 11)
    assert given(turns) == [11] and turns.peers() == []


def test_threads_wait_for_items_that_are_let_go() -> None:
    turns: BlockingFairQueue[int] = BlockingFairQueue()
    turns.pause(b"a")
    turns.put(b"a", 10)
    assert len(turns) == 0 and turns.of(b"a") == 1
    turns.resume(b"a")
    assert turns.get() == 10
    turns.close()
    assert turns.get() is None
