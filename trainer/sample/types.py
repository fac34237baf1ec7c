"""What flows between the stages of sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids


@dataclass(frozen=True)
class HopRequest:
    """Ask for neighbours of ``nodes``; a pure function of its fields and the graph."""

    nodes: Ids  #: int64 [n] global ids, no duplicates needed
    fanout: int  #: neighbours per node; -1 takes all
    shuffle: int  #: how many leading picks must be in drawn order (a later hop may want a prefix)
    key: int  #: uint64 from ``rng.batch_key(seed, epoch, step)``
    replace: bool = False
    with_edge_id: bool = False


@dataclass(frozen=True)
class HopSample:
    """The neighbours found, grouped by target in request order."""

    counts: npt.NDArray[np.int32]  #: int32 [n] neighbours taken per node
    src: Array  #: int32|int64 [counts.sum()] global ids
    edge_id: Ids | None  #: int64 [counts.sum()] original edge ids, if asked for


class GraphAccess(Protocol):
    """What a sampler and a gatherer need of a graph, local, remote or both."""

    def sample_hop(self, request: HopRequest) -> HopSample:
        """Neighbours of the requested nodes. Raises ``ServiceError``."""

    def gather(self, nodes: Ids, attrs: Sequence[str]) -> Mapping[str, Array]:
        """Rows of node attributes, in request order; name -> [n, …] in stored dtype.

        Besides the dataset's attributes there are ``orig_id`` (int64) and ``in_degree`` (int64).
        Raises ``ServiceError``, or ``PartitionError`` for an unknown attribute or foreign id.
        """
