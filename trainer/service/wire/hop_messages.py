"""Encodes and decodes requests for sampled neighbours (``HopRequest``), and the replies.

A message has one record per request. The first nine fields are indices into the names and arrays of the message (i32,
-1: absent): edge type, nodes, trees, times, name of the time attribute, name of the weight attribute, targets and
sources of excluded edges, allowed sources. Then follow flags u32 · fanout i64 · shuffle i64 · key u64. The reply
contains, for each request in turn, the arrays counts, sources and, if requested, edge ids.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import WireError
from trainer.sampler.types import HopRequest, HopSample, TimeBound
from trainer.service.wire.frames import MAX_ARRAYS, NONE, Kind, Message, TableReader, TableWriter, check_ids, narrow_ids

_RECORD = struct.Struct("<9iIqqQ")

_REPLACE, _WITH_EDGE, _ON_NODE, _ON_EDGE, _LAST = 1, 2, 4, 8, 16

_ALL_FLAGS = 31

MAX_ROWS = 1 << 25  #: nodes, excluded edges and allowed sources of all requests of a message

_MAX_FANOUT = (1 << 31) - 1  # counts are int32


def sample_request(requests: Sequence[HopRequest]) -> Message:
    """Encode several requests in one message. Raises ``WireError`` if they exceed a limit."""
    table = TableWriter()
    return table.message(Kind.SAMPLE, b"".join(_record(table, request) for request in requests))


def _record(table: TableWriter, request: HopRequest) -> bytes:
    bound = request.bound
    dst, src = (None, None) if request.exclude is None else request.exclude
    return _RECORD.pack(
        table.type(request.edge_type),
        table.ids(request.nodes),
        table.ids(request.trees),
        table.ids(bound.times if bound else None),
        table.name(bound.attr if bound else None),
        table.name(request.weight),
        table.ids(dst),
        table.ids(src),
        table.ids(request.sources),
        _flags(request),
        request.fanout,
        request.shuffle,
        int(request.key),
    )


def _flags(request: HopRequest) -> int:
    flags = _REPLACE * request.replace | _WITH_EDGE * request.with_edge
    if request.bound is not None:
        flags |= _ON_NODE if request.bound.on == "node" else _ON_EDGE
        flags |= _LAST * request.bound.last
    return flags


def read_sample_request(message: Message) -> list[HopRequest]:
    """Decode the requests in a message. Raises ``WireError`` if one is invalid."""
    table = TableReader(message)
    requests, rows = [], 0
    for record in table.records(_RECORD):
        requests.append(_read_record(table, *record))
        rows += _num_rows(requests[-1])  # many records may refer to the same array
        if rows > MAX_ROWS:
            raise WireError(f"the requests have more than {MAX_ROWS} nodes and excluded edges; ask for fewer at once")
    if sum(map(_num_arrays, requests)) > MAX_ARRAYS:
        raise WireError(f"a reply to {len(requests)} requests would have more than {MAX_ARRAYS} arrays")
    return requests


def _read_record(
    table: TableReader, edge_type: int, nodes: int, trees: int, times: int, attr: int, weight: int,
    dst: int, src: int, sources: int, flags: int, fanout: int, shuffle: int, key: int,
) -> HopRequest:  # fmt: skip
    if flags > _ALL_FLAGS or not -1 <= fanout <= _MAX_FANOUT or shuffle < 0:
        raise WireError(f"a request has invalid values: fanout {fanout}, shuffle {shuffle}, flags {flags}")
    request = HopRequest(
        edge_type=table.edge_type(edge_type),
        nodes=table.ids(nodes),
        fanout=fanout,
        shuffle=shuffle,
        key=key,
        replace=bool(flags & _REPLACE),
        with_edge=bool(flags & _WITH_EDGE),
        trees=None if trees == NONE else table.ids(trees),
        bound=_read_bound(table, times, attr, flags),
        weight=None if weight == NONE else table.name(weight),
        exclude=None if dst == src == NONE else (table.ids(dst), table.ids(src)),
        sources=None if sources == NONE else table.ids(sources),
    )
    _check_lengths(request)
    return request


def _read_bound(table: TableReader, times: int, attr: int, flags: int) -> TimeBound | None:
    on = flags & (_ON_NODE | _ON_EDGE)
    if times == attr == NONE and not flags & (_ON_NODE | _ON_EDGE | _LAST):
        return None
    if on not in (_ON_NODE, _ON_EDGE):
        raise WireError(f"a time bound has invalid flags {flags}")
    return TimeBound(table.ids(times), table.name(attr), "node" if on == _ON_NODE else "edge", bool(flags & _LAST))


def _check_lengths(request: HopRequest) -> None:
    rows = [request.nodes, request.trees, request.bound.times if request.bound else None]
    lengths = {len(array) for array in rows if array is not None}
    if len(lengths) > 1 or (request.exclude is not None and len(request.exclude[0]) != len(request.exclude[1])):
        raise WireError("the arrays of a request have different lengths")
    if request.sources is not None and np.any(request.sources[1:] < request.sources[:-1]):
        raise WireError("the allowed sources of a request are not in ascending order")


def _num_rows(request: HopRequest) -> int:
    excluded = 0 if request.exclude is None else len(request.exclude[0])
    return len(request.nodes) + excluded + (0 if request.sources is None else len(request.sources))


def _num_arrays(request: HopRequest) -> int:
    return 2 + request.with_edge


def sample_arrays(samples: Sequence[HopSample]) -> list[Array]:
    arrays: list[Array] = []
    for sample in samples:
        arrays += sample.counts, narrow_ids(sample.src)
        if sample.edge is not None:
            arrays.append(narrow_ids(sample.edge))
    return arrays


def read_samples(message: Message, requests: Sequence[HopRequest]) -> list[HopSample]:
    """Decode the reply to ``requests``. Raises ``WireError`` if the reply does not fit the requests."""
    if len(message.arrays) != sum(map(_num_arrays, requests)):
        raise WireError(f"the reply has {len(message.arrays)} arrays for {len(requests)} requests")
    arrays = iter(message.arrays)
    return [
        _checked(request, HopSample(next(arrays), next(arrays), next(arrays) if request.with_edge else None))
        for request in requests
    ]


def _checked(request: HopRequest, sample: HopSample) -> HopSample:
    counts, num_nodes = sample.counts, len(request.nodes)
    if counts.dtype != np.int32 or counts.shape != (num_nodes,) or (num_nodes and counts.min() < 0):
        raise WireError(f"the reply has counts of dtype {counts.dtype} and shape {counts.shape} for {num_nodes} nodes")
    total = counts.sum(dtype=np.int64)
    for ids in (sample.src, sample.edge):
        if ids is not None and len(check_ids(ids)) != total:
            raise WireError(f"the reply has {len(ids)} neighbours, but its counts add up to {total}")
    return sample
