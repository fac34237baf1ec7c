"""The client of one graph server: requests hops, rows and batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, Ids
from trainer.core.errors import ServerGone, ServiceError, WireError
from trainer.core.remote_settings import WireRows
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler.subgraph_sampler import BatchWork, SampledBatch
from trainer.sampler.types import EdgeList, HopRequest, HopSample, RowRequest
from trainer.service.channel import Call, Channel
from trainer.service.service_keys import ServiceKeys
from trainer.service.wire import batch_messages, hop_messages, messages
from trainer.service.wire.frames import Flag, Kind, Message, Status
from trainer.service.wire.messages import FLAG_OF, ClientName, HelloInfo, ServerAddress, ServerStats, SharedSlice

PIECE = 4 << 20  #: bytes of an answer, about

UNDER_WAY = 4  #: pieces

_ROW = 1 << 10  #: bytes of a row, as long as none has come


class PendingRows(Protocol):
    """An answer under way; ``client.PendingReply`` is one."""

    received: int

    def result(self, timeout: float | None = None) -> list[dict[str, Array]]: ...


class RowSizes:
    """How many bytes rows have taken on the wire, by type and attributes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._found: dict[tuple[AnyType, tuple[str, ...]], int] = {}

    def rows_of(self, requests: Sequence[RowRequest]) -> int:
        """How many rows of the widest of these requests make a piece."""
        widest = max((self._found.get((request.of, request.attrs), _ROW) for request in requests), default=_ROW)
        return max(1, PIECE // widest)

    def note(self, requests: Sequence[RowRequest], rows: Sequence[Mapping[str, Array]]) -> None:
        for request, found in zip(requests, rows, strict=True):
            if count := len(request.ids):
                size = sum(values.nbytes for values in found.values()) // count
                self._found[request.of, request.attrs] = max(1, size)


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a request that lie next to each other."""

    number: int  #: of the request
    begin: int
    end: int


def cut_requests(requests: Sequence[RowRequest], most: int) -> Iterator[list[RowSlice]]:
    """Pieces of at most ``most`` rows, in order; a request without rows has a slice, too."""
    piece: list[RowSlice] = []
    room = most
    for number, request in enumerate(requests):
        begin, count = 0, len(request.ids)
        while True:
            end = min(count, begin + room)
            piece.append(RowSlice(number, begin, end))
            room -= end - begin
            begin = end
            if room == 0 and not (begin == count and number + 1 == len(requests)):
                yield piece
                piece, room = [], most
            if begin == count:
                break
    if piece:
        yield piece


class RowsInPieces:
    """The answers to ``requests``, some pieces at a time; used as ``client.PendingReply``, by one thread."""

    def __init__(
        self, requests: Sequence[RowRequest], submit: Callable[[Sequence[RowRequest]], PendingRows], sizes: RowSizes
    ):
        self.received = 0  #: bytes of the answers that are here
        self._requests, self._submit, self._sizes = requests, submit, sizes
        self._waiting = deque(cut_requests(requests, sizes.rows_of(requests)))
        self._under_way: deque[tuple[list[RowSlice], list[RowRequest], PendingRows]] = deque()
        self._found: list[dict[str, Array]] = [{} for _ in requests]
        self._ask()

    def result(self, timeout: float | None = None) -> list[dict[str, Array]]:
        """``timeout``: for each piece. Raises as ``PendingReply``, and ``WireError`` for pieces that differ."""
        while self._under_way:
            slices, requests, pending = self._under_way[0]
            rows = pending.result(timeout)
            self.received += pending.received
            self._under_way.popleft()
            self._ask()
            self._sizes.note(requests, rows)
            for part, found in zip(slices, rows, strict=True):
                self._put(part, found)
        return self._found

    def _ask(self) -> None:
        while self._waiting and len(self._under_way) < UNDER_WAY:
            slices = self._waiting.popleft()
            asked = [self._requests[part.number] for part in slices]
            requests = [
                replace(request, ids=request.ids[part.begin : part.end])
                for part, request in zip(slices, asked, strict=True)
            ]
            self._under_way.append((slices, requests, self._submit(requests)))

    def _put(self, part: RowSlice, rows: dict[str, Array]) -> None:
        found, count = self._found[part.number], len(self._requests[part.number].ids)
        for name, values in rows.items():
            if part.end - part.begin == count:
                found[name] = values
                continue
            whole = found.get(name)
            if whole is None:
                whole = found[name] = slabs.empty((count, *values.shape[1:]), values.dtype)
            if (whole.dtype, whole.shape[1:]) != (values.dtype, values.shape[1:]):
                raise WireError(
                    f"rows of {name} came as {whole.dtype} {whole.shape[1:]} and as {values.dtype} {values.shape[1:]}"
                )
            whole[part.begin : part.end] = values


T = TypeVar("T")


class PendingReply(Generic[T]):
    """An answer under way. Any thread may wait for it; the one that asked does so fastest."""

    def __init__(self, client: HostClient, channel: Channel, call: Call, read: Callable[[Message], T]):
        self._client, self._channel, self._call, self._read = client, channel, call, read
        self._asked_at = time.monotonic()
        self.received = 0  #: bytes of the answer, once it is here

    def result(self, timeout: float | None = None) -> T:
        """Wait at most ``timeout`` seconds (default: the client's deadline) from now.

        Raises ``ServiceError`` naming the server and the cause, ``ServerGone`` where another one may answer.
        """
        patience = self._client.deadline if timeout is None else timeout
        kind = self._call.request.kind.name.lower()
        reply = self._channel.wait(self._call, time.monotonic() + patience, self._client.check_open)
        if reply is None:
            waited = time.monotonic() - self._asked_at
            if self._call.request.kind == Kind.BATCH:
                self._channel.abandon(self._call)
            raise self._client.no_answer(kind, waited, self._channel.state, self._call.gone)
        self.received = reply.size
        if reply.kind == Kind.BATCH:
            self._channel.tell(messages.taken(self._call.request_id))
        if reply.status != Status.OK or reply.kind != self._call.request.kind:
            raise ServiceError(f"{self._client.name}: {kind} failed: {reply.text or reply.status.name}")
        try:
            return self._read(reply)
        except WireError as error:
            raise ServiceError(f"{self._client.name}: {kind} was answered with nonsense: {error}") from None


class HostClient:
    """Asks one graph server; safe to use from several threads.

    Each thread has a connection of its own: measured, that halves the time of a small request
    against one shared connection behind an I/O thread. Requests may be sent again after a lost
    connection, which is harmless because they only read.
    """

    def __init__(
        self, place: ServerAddress, deadline: float, keys: ServiceKeys | None = None, *, route: bool = False,
        gone_after: float | None = None, wire_rows: WireRows = "stored",
    ):  # fmt: skip
        """``route``: ask for the whole graph, not only for the server's own parts; ``gone_after``: seconds of a
        lost server until ``ServerGone``; None: as the channel has it; ``wire_rows``: what floating-point rows are
        rounded to on their way."""
        self.place = place
        self.deadline = deadline  #: seconds
        self._keys, self._gone_after = keys, gone_after
        self._flags = Flag(Flag.ROUTE * route | FLAG_OF[wire_rows])
        self._row_sizes = RowSizes()
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._own = threading.local()
        self._closed = False

    @property
    def endpoint(self) -> str:
        return self.place.endpoint

    @property
    def node_rank(self) -> int:
        return self.place.node_rank

    @property
    def host(self) -> str:
        return self.place.host

    @property
    def part_ids(self) -> tuple[int, ...]:
        return self.place.parts

    @property
    def name(self) -> str:
        """The server in words, for messages."""
        if not self.place.name:
            return f"graph server at {self.endpoint}"
        parts = ",".join(map(str, self.part_ids))
        return f"graph server of {self.place.name} at {self.endpoint}, parts {parts}"

    @property
    def bytes_received(self) -> int:
        """Bytes of all answers so far, over all threads."""
        with self._lock:
            return sum(channel.bytes_received for channel in self._channels)

    def submit_sample(self, requests: Sequence[HopRequest]) -> PendingReply[list[HopSample]]:
        """Ask for several hops in one message; the answers' ids are int32 where they fit."""
        return self._submit(
            lambda: hop_messages.sample_request(requests), lambda reply: hop_messages.read_samples(reply, requests)
        )

    def submit_gather(self, requests: Sequence[RowRequest]) -> PendingRows:
        """Ask for rows of attributes, in pieces where they are many; each answer maps names to [n, …] in request
        order."""
        return RowsInPieces(requests, self._submit_rows, self._row_sizes)

    def submit_has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> PendingReply[npt.NDArray[np.bool_]]:
        """Ask which of these edges exist: bool [n]."""
        return self._submit(
            lambda: messages.has_edges_request(edge_type, src, dst), lambda reply: messages.read_found(reply, len(dst))
        )

    def submit_edges(self, part_id: int, edge_type: EdgeType, first: int, count: int) -> PendingReply[EdgeList]:
        """Ask for ``count`` edges of a part, at most ``EDGES_AT_ONCE``, from slot ``first`` on."""
        return self._submit(
            lambda: messages.edges_request(part_id, edge_type, first, count),
            lambda reply: messages.read_edges(reply, count),
        )

    def submit_batch(self, work: BatchWork, client: ClientName) -> PendingReply[SampledBatch]:
        """Ask for a whole batch; the server is told when it has come."""

        def read(reply: Message) -> SampledBatch:
            sampled = batch_messages.read_batch(reply, work)
            return replace(sampled, cost=sampled.cost.of_host(self.node_rank))

        return self._submit(lambda: batch_messages.batch_request(work, client), read)

    def submit_manifest(self) -> PendingReply[bytes]:
        """Ask for the bytes of ``manifest.json``."""
        return self._submit(lambda: Message(Kind.MANIFEST, Status.REQUEST, 0), messages.read_manifest_text)

    def submit_shared(self, asked: SharedSlice) -> PendingReply[Array]:
        """Ask for rows of an array that all parts share."""
        return self._submit(lambda: messages.shared_request(asked), lambda reply: messages.read_shared(reply, asked))

    def submit_to_global(self, of: NodeType, orig_ids: Ids) -> PendingReply[Ids]:
        """Ask for the global ids of original ids: int64 [n]."""
        return self._submit(
            lambda: messages.to_global_request(of, orig_ids), lambda reply: messages.read_ids(reply, len(orig_ids))
        )

    def submit_hello(self) -> PendingReply[HelloInfo]:
        """Ask who the server is."""
        return self._submit(lambda: Message(Kind.HELLO, Status.REQUEST, 0), messages.read_hello)

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        """In-edges of nodes the server owns. Raises ``ServiceError``."""
        return self.submit_sample(requests).result()

    def gather(self, requests: Sequence[RowRequest]) -> list[dict[str, Array]]:
        """Rows of nodes and edges the server owns. Raises ``ServiceError``."""
        return self.submit_gather(requests).result()

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        """Which edges to nodes the server owns exist. Raises ``ServiceError``."""
        return self.submit_has_edges(edge_type, src, dst).result()

    def hello(self) -> HelloInfo:
        """Who the server is. Raises ``ServiceError``."""
        return self.submit_hello().result()

    def stats(self) -> ServerStats:
        """The server's counters. Raises ``ServiceError``."""
        return self._submit(lambda: Message(Kind.STATS, Status.REQUEST, 0), messages.read_stats).result()

    def close(self) -> None:
        """End all connections; threads that wait for an answer raise ``ServiceError``."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def check_open(self) -> None:
        """Raises ``ServiceError`` after ``close()``."""
        if self._closed:
            raise ServiceError(f"{self.name}: the client was closed")

    def no_answer(self, kind: str, seconds: float, state: str, gone: bool) -> ServiceError:
        """The error of a deadline that passed, or of a server that is gone."""
        return (ServerGone if gone else ServiceError)(
            f"{self.name}: no answer within {round(seconds, 1):g} s to {kind} ({state}); " + self._advice()
        )

    def _advice(self) -> str:
        if not self.place.name:
            return "is a graph server running there, and is the key one that it admits (gnnfleet serve key)?"
        return f"is its process alive? see logs/server.log of node{self.node_rank}"

    def _submit_rows(self, requests: Sequence[RowRequest]) -> PendingReply[list[dict[str, Array]]]:
        return self._submit(
            lambda: messages.gather_request(requests), lambda reply: messages.read_rows(reply, requests)
        )

    def _submit(self, build: Callable[[], Message], read: Callable[[Message], T]) -> PendingReply[T]:
        channel: Channel | None = getattr(self._own, "channel", None)
        if channel is None:
            channel = self._own.channel = self._take_channel()
        self.check_open()
        try:
            return PendingReply(self, channel, channel.submit(replace(build(), flags=self._flags)), read)
        except WireError as error:
            raise ServiceError(f"{self.name}: the request cannot be sent: {error}") from None

    def _take_channel(self) -> Channel:
        """The channel of a thread that has ended, or a new one."""
        with self._lock:
            self.check_open()
            for channel in self._channels:
                if not channel.owner.is_alive():
                    channel.owner = threading.current_thread()
                    return channel
            self._channels.append(Channel(self.endpoint, self._keys, self._gone_after))
            return self._channels[-1]
