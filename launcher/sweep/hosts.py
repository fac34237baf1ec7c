"""Which hosts are free for the next trial of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


class HostPool:
    """The nodes of the config, by name, in the order of the file; divided into groups of ``size``.

    A group is used by one trial at a time. The blocks of the file come first (the first ``size`` nodes, the next, …):
    each node then keeps its node rank, and with it its part, in all trials. Nodes of blocks that are not whole, as one
    was lost or is left over, form further groups when no block is free.
    """

    def __init__(self, names: Sequence[str], size: int):
        self.names, self.size = tuple(names), size
        self.lost: set[str] = set()

    def free_group(self, busy: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes for the next trial; () if too few are free. ``busy``: nodes of running trials."""
        taken = {*busy, *self.lost}
        blocks = [self.names[i : i + self.size] for i in range(0, len(self.names), self.size)]
        rest: list[str] = []
        for block in blocks:
            free = [name for name in block if name not in taken]
            if len(free) == self.size:
                return tuple(free)
            rest += free
        return tuple(rest[: self.size]) if len(rest) >= self.size else ()

    @property
    def left(self) -> list[str]:
        return [name for name in self.names if name not in self.lost]

    def update(self, checked: Collection[str], unreachable: Collection[str]) -> tuple[list[str], list[str]]:
        """Take the answer of a check of some nodes; return those that are lost now, and those that came back."""
        gone = [name for name in self.names if name in unreachable and name not in self.lost]
        back = [name for name in self.names if name in checked and name not in unreachable and name in self.lost]
        self.lost = (self.lost - {*back}) | {*gone}
        return gone, back
