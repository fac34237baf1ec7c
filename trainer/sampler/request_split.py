"""Who answers which rows of a call; what several of its requests share is split once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trainer.core.arrays import Array, Ids
from trainer.core.schema import AnyType
from trainer.sampler.types import HopRequest

Groups = Mapping[int, Array]  #: host -> int32 positions, ascending


class Split:
    """One call's arrays by host. Lives as long as the call, so an array's ``id()`` stays its own.

    Cuts of one array for one host are one object again, so that they are sent once.
    """

    def __init__(self, group: Callable[[AnyType, Ids], Groups]):
        self._group = group  #: positions of ids by the host that answers for them
        self._groups: dict[tuple[AnyType, int], Groups] = {}
        self._cuts: dict[tuple[int, int], Ids] = {}

    def groups(self, of: AnyType, ids: Ids) -> Groups:
        """Positions of ``ids``, int64 [n], by host."""
        key = of, id(ids)
        if key not in self._groups:
            self._groups[key] = self._group(of, ids)
        return self._groups[key]

    def cut(self, array: Ids, at: Array) -> Ids:
        """``array[at]``; ``at`` comes from ``groups``."""
        if len(at) == len(array):
            return array
        key = id(array), id(at)
        if key not in self._cuts:
            self._cuts[key] = array[at]
        return self._cuts[key]

    def hop(self, request: HopRequest, host: int, at: Array) -> HopRequest:
        """What ``host`` has to know of a request: its rows, and exclusions of edges it owns."""
        bound = request.bound
        return replace(
            request,
            nodes=self.cut(request.nodes, at),
            trees=None if request.trees is None else self.cut(request.trees, at),
            bound=None if bound is None else replace(bound, times=self.cut(bound.times, at)),
            exclude=self._exclusions(request, host),
        )

    def _exclusions(self, request: HopRequest, host: int) -> tuple[Ids, Ids] | None:
        if request.exclude is None:
            return None
        targets, sources = request.exclude
        at = self.groups(request.edge_type[2], targets).get(host)
        return None if at is None else (self.cut(targets, at), self.cut(sources, at))
