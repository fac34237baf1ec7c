"""Samples and gathers batches on a CUDA device.

Each sampler thread uses a stream of its own (``StreamPool``), on which the loader then also cuts the blocks. The thread
waits for its stream several times per batch, to read the sizes of tensors, and once at the end of the batch. Meanwhile,
training steps run on another stream and do not wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.batch_cost import Cost
from trainer.core.schema import AnyType, NodeType
from trainer.cuda.array_ops import TorchOps
from trainer.cuda.features import FeatureRows
from trainer.cuda.gather_kernels import take_numbers
from trainer.cuda.hop_sampling import DeviceHops
from trainer.cuda.relabel import DeviceTables
from trainer.cuda.topology import DeviceTopology
from trainer.sampler.multi_hop import sample_multi_hop
from trainer.sampler.subgraph_sampler import SampledBatch, SubgraphSampler
from trainer.sampler.types import RowRequest, SampledSubgraph, SeedSet
from trainer.store.manifest import LOOPLESS_DEGREE
from trainer.store.part_store import PartStore


@dataclass
class DeviceSampler:
    """A ``Sampler`` whose batches are on a device, and equal those of ``host`` bit for bit. Thread-safe.

    Rows of ``x`` and of edge features are float32. The CPU gathers labels, and rows that no kernel can read.
    """

    host: SubgraphSampler  #: its settings, attributes and labels are those of the batches
    store: PartStore
    topology: DeviceTopology
    features: Mapping[tuple[AnyType, str], FeatureRows]
    device: torch.device
    streams: StreamPool  #: for the threads that call this sampler
    _hops: DeviceHops = field(init=False, repr=False)
    _ops: TorchOps = field(init=False, repr=False)
    _degrees: dict[NodeType, Tensor] = field(init=False, repr=False, default_factory=dict)  #: int64 [num_nodes]

    def __post_init__(self) -> None:
        self._hops, self._ops = DeviceHops(self.topology, self.store, self.device), TorchOps(self.device)
        for of, nodes in self.store.manifest.nodes.items():
            if LOOPLESS_DEGREE in self.host.attrs.get(of, ()):
                wanted = RowRequest(of, np.arange(nodes.num_nodes), (LOOPLESS_DEGREE,))
                (found,) = self.host.access.gather([wanted])
                self._degrees[of] = torch.from_numpy(np.asarray(found[LOOPLESS_DEGREE])).to(self.device)
        self.host.access.take_cost()  # discarded, as it belongs to no batch

    def sample(self, seeds: SeedSet, key: int) -> SampledBatch:
        """Sample a subgraph around ``seeds`` and gather the rows of its nodes and edges. Raises ``ServiceError``."""
        access = self.host.access
        access.take_cost()
        began = time.perf_counter()
        with self.streams.stream():
            subgraph = self._subgraph(seeds, key)
            found_at = time.perf_counter()
            # The attributes of all sampled nodes and edges, as tensors on the device.
            rows: dict[AnyType, dict[str, Any]] = {}
            for of, nodes in subgraph.nodes.items():
                ids: Any = nodes.ids
                orig_id = torch.empty(len(ids), dtype=torch.int64, device=self.device)
                take_numbers(len(ids), self.topology.nodes[of].argument, ids, orig_id)
                rows[of] = {"orig_id": orig_id}
                if of in self._degrees:
                    rows[of][LOOPLESS_DEGREE] = self._degrees[of][ids]
            far: list[tuple[FeatureRows, Tensor, Tensor, RowRequest]] = []
            for (kind, name), feature in self.features.items():
                wanted: Any = subgraph.nodes[kind].ids if isinstance(kind, str) else subgraph.edges[kind].edge
                assert wanted is not None, "edge features need edge ids"
                out, missing = feature.take(wanted)
                rows.setdefault(kind, {})[name] = out
                if len(missing):
                    far.append((feature, out, missing, RowRequest(kind, wanted[missing].cpu().numpy(), (name,))))
            if far:
                found = access.gather([request for *_, request in far])
                for (feature, out, missing, request), answer in zip(far, found, strict=True):
                    feature.join(out, missing, answer[request.attrs[0]])
            labels: Mapping[str, Array] = {}
            target, names = self.host.labels
            if names:
                (labels,) = access.gather([RowRequest(target, np.asarray(seeds.nodes[target]), names)])
        cost = access.take_cost()
        seconds = Cost(sample_s=found_at - began, gather_s=time.perf_counter() - found_at - cost.wait_s)
        if getattr(access, "remotes", {}):  # count all rows of the batch, not only those that the CPU gathered
            with_ids = [edges.edge for edges in subgraph.edges.values() if edges.edge is not None]
            count = sum(len(nodes.ids) for nodes in subgraph.nodes.values()) + sum(map(len, with_ids))
            cost = replace(cost, rows=count)
        return SampledBatch(subgraph, rows, labels, cost + seconds)

    def subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
        """Sample a subgraph around ``seeds``, without attributes."""
        with self.streams.stream():
            return self._subgraph(seeds, key)

    def _subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
        tables = DeviceTables(self.host.schema, self._ops)
        return sample_multi_hop(self._hops, self.host.schema, seeds, self.host.settings, key, tables)


class StreamPool:
    """Streams on one device, each used by one thread at a time. Thread-safe. Without CUDA, contexts do nothing.

    Threads of later epochs get the same streams again. torch keeps memory that is freed on a stream for later
    allocations on that stream, so with new streams the memory of earlier epochs would not be used again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[Any] = []  #: ``torch.cuda.Stream``
        self._of_thread = threading.local()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Within this context, this thread's work on the device uses a stream of its own. Waits for it at the end.

        A context within another one uses the same stream. Tensors made here may be used on other streams afterwards;
        if they are freed there, ``Tensor.record_stream`` must be called before.
        """
        if self._device.type != "cuda":
            yield
        elif (outer := getattr(self._of_thread, "stream", None)) is not None:
            yield
            outer.synchronize()
        else:
            try:
                own = self._free.pop()
            except IndexError:
                own = torch.cuda.Stream(self._device)
            self._of_thread.stream = own
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(own):
                    yield
                    own.synchronize()
            finally:
                self._of_thread.stream = None
                self._free.append(own)
