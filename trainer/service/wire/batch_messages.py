"""Encodes and decodes requests for whole batches, and the replies.

The records of a message are a sequence of int64, in the order in which ``batch_request`` and ``batch_reply`` write
them; some are indices into the names and arrays of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from trainer.core.arrays import Array, Columns, Ids
from trainer.core.batch_cost import Cost
from trainer.core.errors import WireError
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler.subgraph_sampler import BatchWork, SampledBatch
from trainer.sampler.types import EdgeRanges, EdgeSet, NodeSet, SampledSubgraph, SampleSettings, SeedSet, TimeRule
from trainer.service.wire.frames import NONE, Kind, Message, TableReader, TableWriter
from trainer.service.wire.messages import ClientName, FormOf, restored, rounded

MAX_SEEDS = 1 << 20  #: largest number of seeds of one batch, over all types

MAX_HOPS = 64

MAX_CLIENT_NAME = 200  #: characters

_HEADER = struct.Struct("<QQq")  # key of the batch, number of the client, index of its name

_REPLACE, _DISJOINT, _INDUCED, _EDGE_IDS, _ASK_AGAIN, _TIME_ON_EDGE, _TIME_LAST = (1 << bit for bit in range(7))

_ALL_FLAGS = (1 << 7) - 1

_FANOUT_LIMIT = 1 << 31


class _RecordWriter:
    def __init__(self) -> None:
        self.table = TableWriter()
        self._numbers: list[int] = []

    def put(self, *numbers: int) -> None:
        self._numbers += numbers

    def many(self, numbers: Sequence[int]) -> None:
        """Add the length of a sequence, then its elements."""
        self.put(len(numbers), *numbers)

    def names(self, names: Iterable[str]) -> None:
        self.many([self.table.name(name) for name in names])

    def arrays(self, *arrays: Array | None) -> None:
        self.put(*map(self.table.array, arrays))

    def rows(self, rows: Columns) -> None:
        self.names(rows)
        self.arrays(*rows.values())

    def rounded(self, of: AnyType, rows: Columns, form_of: FormOf) -> None:
        self.names(rows)
        for name, column in rows.items():
            mark, arrays = rounded(name, column, form_of(of, name))
            self.put(mark)
            self.arrays(*arrays)

    @property
    def records(self) -> bytes:
        return struct.pack(f"<{len(self._numbers)}q", *self._numbers)


class _RecordReader:
    """Reads the records that ``_RecordWriter`` has written. All methods raise ``WireError`` for invalid numbers."""

    def __init__(self, message: Message, skip: int = 0):
        records = message.records[skip:]
        if len(records) % 8:
            raise WireError(f"the message has {len(message.records)} bytes of records, expected a multiple of 8")
        self.table = TableReader(message)
        self._numbers = struct.unpack(f"<{len(records) // 8}q", records)
        self._at = 0
        self._last = NONE  #: index of the last array of rows

    def number(self) -> int:
        return self._run(1)[0]

    def count(self) -> int:
        """Read the length of a sequence. Raises ``WireError`` if the records have fewer numbers left than this."""
        return self._within(self.number())

    def many(self) -> tuple[int, ...]:
        return self._run(self.count())

    def names(self) -> tuple[str, ...]:
        return tuple(map(self.table.name, self.many()))

    def array(self) -> Array:
        return self.table.array(self.number())

    def array_or_none(self) -> Array | None:
        place = self.number()
        return None if place == NONE else self.table.array(place)

    def any_type(self) -> AnyType:
        return self.table.type(self.number())

    def node_type(self) -> NodeType:
        return self.table.node_type(self.number())

    def edge_type(self) -> EdgeType:
        return self.table.edge_type(self.number())

    def rows(self) -> dict[str, Array]:
        names = self.names()
        return dict(zip(names, [self.array() for _ in names], strict=True))

    def rounded(self) -> dict[str, Array]:
        arrays = self._each_once()
        return {name: restored(self.number(), arrays) for name in self.names()}

    def _each_once(self) -> Iterator[Array]:
        # Restoring one array many times could take much more memory than the message.
        while True:
            place = self.number()
            if place <= self._last:
                raise WireError(
                    f"rows refer to array {place} after array {self._last}, but array numbers must increase"
                )
            self._last = place
            yield self.table.array(place)

    def end(self) -> None:
        if self._at != len(self._numbers):
            raise WireError(f"the records have {len(self._numbers)} numbers, expected {self._at}")

    def _run(self, count: int) -> tuple[int, ...]:
        self._at += self._within(count)
        return self._numbers[self._at - count : self._at]

    def _within(self, count: int) -> int:
        if not 0 <= count <= len(self._numbers) - self._at:
            raise WireError(f"the records announce {count} numbers, but only {len(self._numbers) - self._at} are left")
        return count


def batch_request(work: BatchWork, client: ClientName) -> Message:
    """Encode a request for a whole batch. Raises ``WireError`` if the message exceeds a limit."""
    out = _RecordWriter()
    name = out.table.name(client.name)
    _put_settings(out, work.settings)
    _put_seeds(out, work.seeds)
    out.put(len(work.attrs))
    for of, names in work.attrs.items():
        out.put(out.table.type(of))
        out.names(names)
    label_type, labels = work.labels
    out.put(NONE if label_type == "" else out.table.type(label_type))
    out.names(labels)
    return out.table.message(Kind.BATCH, _HEADER.pack(int(work.key), client.number, name) + out.records)


def _put_settings(out: _RecordWriter, settings: SampleSettings) -> None:
    time = settings.time
    out.put(
        _REPLACE * settings.replace
        | _DISJOINT * settings.disjoint
        | _INDUCED * settings.induced
        | _EDGE_IDS * settings.edge_ids
        | _ASK_AGAIN * settings.ask_again
        | _TIME_ON_EDGE * (time is not None and time.on == "edge")
        | _TIME_LAST * (time is not None and time.last),
        out.table.name(settings.weight),
        out.table.name(None if time is None else time.attr),
        len(settings.fanouts),
    )
    for of, fanouts in settings.fanouts.items():
        out.put(out.table.type(of))
        out.many(fanouts)


def _put_seeds(out: _RecordWriter, seeds: SeedSet) -> None:
    for by_type in (seeds.nodes, seeds.trees, seeds.times):
        out.put(len(by_type))
        for of, ids in by_type.items():
            out.put(out.table.type(of), out.table.ids(ids))
    out.put(len(seeds.exclude))
    for edge_type, (targets, sources) in seeds.exclude.items():
        out.put(out.table.type(edge_type), out.table.ids(targets), out.table.ids(sources))


def read_client(message: Message) -> ClientName:
    if len(message.records) < _HEADER.size:
        raise WireError(f"the message has {len(message.records)} bytes of records, too few for a batch request")
    _, number, place = _HEADER.unpack_from(message.records)
    name = TableReader(message).name(place)
    if len(name) > MAX_CLIENT_NAME or not name.isprintable():
        raise WireError(
            f"the client's name has {len(name)} characters, expected at most {MAX_CLIENT_NAME}, all printable"
        )
    return ClientName(number, name)


def read_batch_request(message: Message) -> tuple[BatchWork, ClientName]:
    """Decode a request for a batch. Returns the work and the client that sent the request.

    Raises ``WireError`` if the request is invalid or exceeds a limit.
    """
    client = read_client(message)
    reader = _RecordReader(message, _HEADER.size)
    key, _, _ = _HEADER.unpack_from(message.records)
    settings, seeds = _read_settings(reader), _read_seeds(reader)
    attrs = {reader.any_type(): reader.names() for _ in range(reader.count())}
    place = reader.number()
    label_type, labels = "" if place == NONE else reader.table.type(place), reader.names()
    reader.end()
    if not isinstance(label_type, str) or (labels and label_type not in seeds.nodes):
        raise WireError(f"the request asks for labels {labels} of {label_type!r}, which has no seeds")
    return BatchWork(settings, seeds, key, attrs, (label_type, labels)), client


def _read_settings(reader: _RecordReader) -> SampleSettings:
    flags, weight, attr = reader.number(), reader.number(), reader.number()
    fanouts = {reader.edge_type(): _read_fanouts(reader) for _ in range(reader.count())}
    if not 0 <= flags <= _ALL_FLAGS or (attr == NONE and flags & (_TIME_ON_EDGE | _TIME_LAST)):
        raise WireError(f"the settings have invalid flags {flags}")
    on_edge, last = bool(flags & _TIME_ON_EDGE), bool(flags & _TIME_LAST)
    return SampleSettings(
        fanouts,
        replace=bool(flags & _REPLACE),
        disjoint=bool(flags & _DISJOINT),
        weight=None if weight == NONE else reader.table.name(weight),
        time=None if attr == NONE else TimeRule(reader.table.name(attr), "edge" if on_edge else "node", last),
        induced=bool(flags & _INDUCED),
        edge_ids=bool(flags & _EDGE_IDS),
        ask_again=bool(flags & _ASK_AGAIN),
    )


def _read_fanouts(reader: _RecordReader) -> tuple[int, ...]:
    fanouts = reader.many()
    if len(fanouts) > MAX_HOPS or not all(-1 <= fanout < _FANOUT_LIMIT for fanout in fanouts):
        raise WireError(
            f"the request has {len(fanouts)} hops with fanouts {fanouts[:MAX_HOPS]}, expected at most {MAX_HOPS} hops "
            f"and fanouts from -1 to {_FANOUT_LIMIT - 1}"
        )
    return fanouts


def _read_seeds(reader: _RecordReader) -> SeedSet:
    nodes, trees, times = (
        {reader.node_type(): reader.table.ids(reader.number()) for _ in range(reader.count())} for _ in range(3)
    )
    exclude = {
        reader.edge_type(): (reader.table.ids(reader.number()), reader.table.ids(reader.number()))
        for _ in range(reader.count())
    }
    if (number := sum(map(len, nodes.values()))) > MAX_SEEDS:
        raise WireError(f"a batch of {number} seeds; a graph server accepts at most {MAX_SEEDS}; use smaller batches")
    if any(of not in nodes or len(ids) != len(nodes[of]) for more in (trees, times) for of, ids in more.items()):
        raise WireError("the request does not have one tree or time for each seed")
    if any(len(targets) != len(sources) for targets, sources in exclude.values()):
        raise WireError("the excluded edges have different numbers of targets and sources")
    return SeedSet(nodes, trees, times, exclude)


def batch_reply(request: Message, sampled: SampledBatch, form_of: FormOf = lambda of, name: "stored") -> Message:
    """Encode the reply to a request for a batch.

    ``form_of(of, name)``: returns the form in which attribute ``name`` of node or edge type ``of`` is sent: "stored",
    "float16" or "int8". Raises ``DataError`` if rows cannot be rounded to float16 or int8.
    """
    out, subgraph = _RecordWriter(), sampled.subgraph
    out.put(subgraph.num_hops, subgraph.induced, len(subgraph.nodes))
    for of, nodes in subgraph.nodes.items():
        out.put(out.table.type(of))
        out.many(nodes.per_hop)
        out.arrays(nodes.ids, nodes.tree)
    out.put(len(subgraph.edges))
    for edge_type, edges in subgraph.edges.items():
        out.put(out.table.type(edge_type))
        out.many(edges.fanouts)
        out.many(edges.per_hop)
        whole = (None, None) if edges.whole is None else (edges.whole.begin, edges.whole.count)
        out.arrays(edges.row_begin, edges.row_count, edges.src, edges.edge, *whole)
    out.put(len(sampled.rows))
    for any_type, rows in sampled.rows.items():
        out.put(out.table.type(any_type))
        out.rounded(any_type, rows, form_of)
    out.rows(sampled.labels)
    return out.table.reply_to(request, out.records)


def read_batch(reply: Message, work: BatchWork) -> SampledBatch:
    """Decode the batch that a server made for ``work``.

    The batch's ``cost`` counts the bytes of the reply, and counts all rows as remote. Raises ``WireError`` if the reply
    does not fit ``work``.
    """
    reader = _RecordReader(reply)
    num_hops, induced, count = reader.number(), bool(reader.number()), reader.count()
    nodes = {reader.node_type(): _read_nodes(reader) for _ in range(count)}
    edges = {reader.edge_type(): _read_edges(reader) for _ in range(reader.count())}
    rows = {reader.any_type(): reader.rounded() for _ in range(reader.count())}
    labels = reader.rows()
    reader.end()
    if num_hops != work.settings.num_hops or induced != work.settings.induced:
        raise WireError(
            f"the batch has {num_hops} hops (induced: {induced}), expected {work.settings.num_hops} (induced: "
            f"{work.settings.induced})"
        )
    subgraph = SampledSubgraph(num_hops, nodes, edges, induced)
    _check_subgraph(subgraph, work)
    gathered = _check_rows(subgraph, rows, work) + _check_labels(labels, work)
    return SampledBatch(subgraph, rows, labels, Cost(remote_bytes=reply.size, rows=gathered, remote_rows=gathered))


def _read_nodes(reader: _RecordReader) -> NodeSet:
    per_hop = reader.many()
    ids, tree = reader.array(), reader.array_or_none()
    if not _is(ids, np.int64) or sum(per_hop) != len(ids) or any(number < 0 for number in per_hop):
        raise WireError(
            f"the node ids are {ids.dtype} {ids.shape} with {per_hop} nodes per hop, expected int64 [n] and hops that "
            "add up to n"
        )
    if tree is not None and not _is(tree, np.int32, len(ids)):
        raise WireError(f"the tree numbers are {tree.dtype} {tree.shape}, expected int32 [{len(ids)}]")
    return NodeSet(ids, per_hop, tree)


def _read_edges(reader: _RecordReader) -> EdgeSet:
    fanouts, per_hop = reader.many(), reader.many()
    begin, count, src, edge = reader.array(), reader.array(), reader.array(), reader.array_or_none()
    whole = reader.array_or_none(), reader.array_or_none()
    if not _is(src, np.int32) or (edge is not None and not _is(edge, np.int64, len(src))):
        raise WireError(
            f"the sources of edges are {src.dtype} {src.shape}, expected int32 [n] and edge ids of the same length"
        )
    places = _edge_ranges(begin, count, len(src))
    rows = None if whole[0] is None or whole[1] is None else _edge_ranges(whole[0], whole[1], len(src))
    return EdgeSet(fanouts, places.begin, places.count, src, edge, per_hop, rows)


def _edge_ranges(begin: Array, count: Array, num_edges: int) -> EdgeRanges:
    if not _is(count, np.int32) or not _is(begin, np.int64, len(count)):
        raise WireError(
            f"the edge ranges are {begin.dtype} {begin.shape} and {count.dtype} {count.shape}, expected int64 [n] and "
            "int32 [n]"
        )
    if len(count) and (begin.min() < 0 or count.min() < 0 or (begin + count).max() > num_edges):
        raise WireError(f"an edge range is outside the {num_edges} edges")
    return EdgeRanges(begin, count)


def _is(array: Array, dtype: type, length: int | None = None) -> bool:
    return array.ndim == 1 and array.dtype == dtype and length in (None, len(array))


def _check_subgraph(subgraph: SampledSubgraph, work: BatchWork) -> None:
    for of, seeds in work.seeds.nodes.items():
        if of not in subgraph.nodes or subgraph.nodes[of].per_hop[:1] != (len(seeds),):
            raise WireError(f"the batch does not begin with the requested seeds of type {of!r}")
    for edge_type, edges in subgraph.edges.items():
        ends = [subgraph.nodes.get(edge_type[0]), subgraph.nodes.get(edge_type[2])]
        num_src, num_dst = (0 if nodes is None else len(nodes.ids) for nodes in ends)
        if len(edges.src) and not 0 <= edges.src.min() <= edges.src.max() < num_src:
            raise WireError(f"edges of type {edge_type} have sources that are not in the batch")
        if len(edges.row_count) > num_dst:
            raise WireError(
                f"edges of type {edge_type} have {len(edges.row_count)} targets, but the batch has only {num_dst} "
                f"nodes of type {edge_type[2]!r}"
            )


def _check_rows(subgraph: SampledSubgraph, rows: Mapping[AnyType, Columns], work: BatchWork) -> int:
    found: dict[AnyType, Ids] = {of: nodes.ids for of, nodes in subgraph.nodes.items()}
    found |= {of: edges.edge for of, edges in subgraph.edges.items() if edges.edge is not None}
    for of, ids in found.items():
        _check_columns(of, rows.get(of, {}), ("orig_id", *work.attrs.get(of, ())), len(ids))
    return sum(map(len, found.values()))


def _check_labels(labels: Columns, work: BatchWork) -> int:
    of, names = work.labels
    number = len(work.seeds.nodes[of]) if names else 0
    _check_columns(of, labels, names, number)
    return number


def _check_columns(of: AnyType, columns: Columns, names: tuple[str, ...], number: int) -> None:
    if set(columns) != set(names) or any(array.shape[:1] != (number,) for array in columns.values()):
        shapes = {name: array.shape for name, array in columns.items()}
        raise WireError(f"the reply has attributes {shapes} of {of!r}, expected {number} rows of {list(names)}")
