"""Describes waits that have passed their deadline: which rank waited, for what, how long, and the cause.

The rank writes ``procs/wait-rank<r>.json`` before it ends (trainer/core/waits.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.node.diagnostics import stacks
from launcher.node.diagnostics.process_state import STOPPED
from launcher.node.json_reader import record_in
from launcher.node.json_records import WAIT

Wait = Mapping[str, Any]  # as in procs/wait-rank<r>.json, with "at" instead of "stack"

_SHOWN = 4  # at most so many ranks are named as "not there"


def read_wait(run_dir: str, rank: int) -> dict[str, Any] | None:
    """Return the expired wait that a rank of this node has reported, or None.

    The rank's stack is appended to ``logs/stacks-rank<r>.log``. The result has "at" in place of the stack: a summary
    with the source line of the wait.
    """
    found = record_in(WAIT, os.path.join(run_dir, "procs", f"wait-rank{rank}.json"))
    if found is None:
        return None
    dump = found.pop("stack")
    stacks.write_log(run_dir, f"rank{rank}", ["the error that has ended a wait:", *dump])
    return {**found, "at": stacks.summary(dump, stacks.roots(run_dir)) if dump[1:] else ""}


@dataclass(frozen=True)
class Processes:
    """The ranks and graph servers of a run, with a summary (one line) of the stack of each."""

    labels: Sequence[str]  #: names of the nodes in messages, by node_rank
    nodes: Mapping[int, int]  #: node_rank of each rank that has not ended
    ranks: Mapping[int, str]  #: summary of each rank's stack; without ranks that have not started
    servers: Mapping[int, str]  #: summary of each graph server's stack, by node_rank

    def folded(self) -> list[str]:
        """Return one line for each different summary, with all ranks that have it."""
        return stacks.folded({rank: [line] for rank, line in self.ranks.items()})

    def rank_name(self, rank: int) -> str:
        return f"rank {rank} on {self.labels[self.nodes[rank]]}" if rank in self.nodes else f"rank {rank}"

    def server_name(self, node: int) -> str:
        return f"the graph server of {self.labels[node] if node < len(self.labels) else f'node{node}'}"

    def held_up(self) -> Iterator[Culprit]:
        """Yield the processes that the kernel keeps from running.

        The order is: stopped ranks, stopped servers, other ranks, other servers.
        """
        ranks = [(stacks.held_up(line), self.nodes.get(rank), rank) for rank, line in sorted(self.ranks.items())]
        servers = [(stacks.held_up(line), node, None) for node, line in sorted(self.servers.items())]
        for words, node, rank in sorted([*ranks, *servers], key=lambda one: one[0] != STOPPED):
            if words and node is not None:
                name = self.server_name(node) if rank is None else self.rank_name(rank)
                yield Culprit(node, rank, f"{name} {verdict(words)}")


@dataclass(frozen=True)
class Culprit:
    """A process that keeps others waiting."""

    node_rank: int
    rank: int | None  #: None: the node's graph server
    text: str  #: ``rank 1 on node1 (gnn2) is stopped (SIGSTOP or a debugger)``


def verdict(words: str) -> str:
    """Return the predicate of a sentence about a process that cannot run, such as ``is stopped (…)``.

    words: result of ``stacks.held_up``.
    """
    return "is stopped (SIGSTOP or a debugger)" if words == STOPPED else words.partition(": ")[2]


def describe(waits: Sequence[Wait], known: Processes) -> Culprit:
    """Return the process that caused expired waits; its ``text`` describes this process and the first of the waits.

    waits: at least one. known: the processes of the run.
    """
    first = min(waits, key=lambda wait: float(wait["t"]))
    who = known.rank_name(first["rank"])
    more = len({wait["rank"] for wait in waits} - {first["rank"]})
    others = f" and {more} other rank{'s' if more > 1 else ''}" if more else ""
    seconds = f"{first['seconds']:.0f} s" if first["seconds"] >= 1 else "too long"
    whom, target = _waited_for(first, known)
    text = f"{who}{others} waited {seconds} for {whom}"
    culprits = list(known.held_up())
    if target is not None:
        culprits.sort(key=lambda one: one.rank is not None or one.node_rank != target)
    if culprits:
        return Culprit(culprits[0].node_rank, culprits[0].rank, f"{culprits[0].text}: {text}")
    if target is not None:
        at = stacks.place(known.servers.get(target, ""))
        return Culprit(target, None, f"{text}; it is at {at}" if at else text)
    absent = []
    if first["of"] == "ranks":
        # Those that may keep the others waiting: no expired wait, and neither at the source line of the first wait nor
        # without a Python frame.
        waiting, there = {wait["rank"] for wait in waits}, (first["at"], stacks.NO_FRAME)
        left = (rank for rank in known.nodes if rank not in waiting)
        absent = sorted(rank for rank in left if stacks.place(known.ranks.get(rank, "")) not in there)
    if absent:
        places = {rank: f"at {stacks.place(known.ranks[rank])}" for rank in absent if rank in known.ranks}
        shown = [f"{known.rank_name(rank)} ({places.get(rank, 'has not started')})" for rank in absent[:_SHOWN]]
        listed = ", ".join(shown)
        listed += f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        return Culprit(known.nodes[absent[0]], absent[0], f"{text}; not there: {listed}")
    return Culprit(known.nodes.get(first["rank"], 0), first["rank"], text)


def _waited_for(wait: Wait, known: Processes) -> tuple[str, int | None]:
    """Return in words what a rank waited for, and the node_rank of the graph server if it waited for one."""
    if wait["of"] == "server" and (wait["server"] or wait["node_rank"] is not None):
        # that of a serving cluster is named as a whole: none of the run's hosts is to blame for it
        node = None if wait["server"] or wait["node_rank"] not in range(len(known.labels)) else int(wait["node_rank"])
        server = wait["server"] or f"node{wait['node_rank']}"
        name = f"the graph server of {server}" if node is None else known.server_name(node)
        return f"{name} to answer a {wait['request']} request", node
    if wait["of"] == "threads":
        return "a batch from its own sampler threads", None
    return f"other ranks ({wait['at']})" if wait["at"] else "other ranks", None


def server_lines(known: Processes, asked: int | None) -> list[str]:
    """Return one line for the graph server of node ``asked``, and for each server that the kernel keeps from running.

    asked: node_rank; None for no node.
    """
    return [
        f"graph server of {known.labels[node]}: {line}"
        for node, line in sorted(known.servers.items())
        if node == asked or stacks.held_up(line)
    ]
