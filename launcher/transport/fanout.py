"""Runs a function for all nodes in parallel, one daemon thread each, so that a hanging node blocks nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Answers(Generic[T]):
    """A value or an error for each node_rank."""

    values: dict[int, T] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def or_raise(self) -> dict[int, T]:
        """Return the values; if nodes have errors, raise that of the lowest node_rank."""
        for node_rank in sorted(self.errors):
            raise self.errors[node_rank]
        return self.values


def on_nodes(
    node_ranks: Iterable[int],
    work: Callable[[int], T],
    *,
    on_error: Callable[[int, Exception], None] | None = None,
    timeout: float | None = None,
) -> Answers[T]:
    """Run ``work(node_rank)`` for each node in its own daemon thread and wait for all of them.

    ``on_error`` is called for each failure as it happens, in the caller's thread. When no node has finished for
    ``timeout`` seconds, the remaining nodes get a TimeoutError. Ctrl-C ends the wait, but the caller must stop the
    threads.
    """
    ranks = list(node_ranks)
    done: queue.SimpleQueue[tuple[int, T | None, Exception | None]] = queue.SimpleQueue()

    def answer(node_rank: int) -> None:
        try:
            done.put((node_rank, work(node_rank), None))
        except Exception as error:  # the waiting thread raises or reports it
            done.put((node_rank, None, error))

    for node_rank in ranks:
        threading.Thread(target=answer, args=(node_rank,), daemon=True).start()
    answers: Answers[T] = Answers()
    for _ in ranks:
        try:
            node_rank, value, error = done.get(timeout=timeout)
        except queue.Empty:
            break
        if error is None:
            answers.values[node_rank] = value  # type: ignore[assignment]
        else:
            answers.errors[node_rank] = error
            if on_error:
                on_error(node_rank, error)
    for node_rank in set(ranks) - set(answers.values) - set(answers.errors):
        answers.errors[node_rank] = TimeoutError(f"node{node_rank} did not answer within {timeout:g} s")
    return answers
