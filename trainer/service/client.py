"""``HostClient``: sends requests to one graph server."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

from trainer.core import slabs
from trainer.core.arrays import Array
from trainer.core.errors import ServerGone, ServiceError, Wait, WireError
from trainer.core.remote_settings import WireRows
from trainer.core.schema import AnyType
from trainer.sampler.replicas import PendingAnswer
from trainer.sampler.requests import Gather, GraphAccess
from trainer.sampler.types import RowRequest
from trainer.service.channel import Call, Channel
from trainer.service.messages import Hello, HelloInfo, ServerAddress, acknowledgement
from trainer.service.service_keys import ServiceKeys
from trainer.wire.columns import FLAG_OF
from trainer.wire.frames import Failure, Flag, Kind, Message, Status
from trainer.wire.request import A, Request

PIECE = 4 << 20  #: approximate bytes per reply when rows are requested in pieces

UNDER_WAY = 4  #: pieces requested at the same time

_ROW = 1 << 10  #: assumed bytes of a row until one has been received


#: bytes per row of past replies, by type and attributes
_RowSizes = dict[tuple[AnyType, tuple[str, ...]], int]

_RowSlice = tuple[int, int, int]  #: index of a request, and the begin and end of some of its rows


class RowsInPieces:
    """Requests many rows in pieces, several at a time, and joins the replies. Not thread-safe.

    A reply has about ``PIECE`` bytes, by the ``sizes`` of rows of past replies, which are noted.
    """

    def __init__(
        self,
        requests: Sequence[RowRequest],
        submit: Callable[[Gather], PendingAnswer[list[Mapping[str, Array]]]],
        sizes: _RowSizes,
    ):
        self.received = 0  #: bytes received so far
        self._requests, self._submit, self._sizes = requests, submit, sizes
        widest = max((sizes.get((request.of, request.attrs), _ROW) for request in requests), default=_ROW)
        self._waiting = deque(cut_requests(requests, max(1, PIECE // widest)))
        self._under_way: deque[tuple[list[_RowSlice], PendingAnswer[Any]]] = deque()
        self._found: list[dict[str, Array]] = [{} for _ in requests]
        self._request_more()

    def result(self, timeout: float | None = None) -> list[Mapping[str, Array]]:
        """Wait for all rows. ``timeout``: seconds to wait for each piece.

        Raises the errors of a reply, and ``WireError`` if pieces differ in dtype or shape.
        """
        while self._under_way:
            slices, pending = self._under_way[0]
            rows = pending.result(timeout)
            self.received += pending.received
            self._under_way.popleft()
            self._request_more()
            for (number, begin, end), found in zip(slices, rows, strict=True):
                request = self._requests[number]
                if end > begin:
                    size = sum(values.nbytes for values in found.values()) // (end - begin)
                    self._sizes[request.of, request.attrs] = max(1, size)
                for name, values in found.items():
                    self._put(self._found[number], name, values, begin, len(request.ids))
        return [*self._found]

    def _request_more(self) -> None:
        while self._waiting and len(self._under_way) < UNDER_WAY:
            slices = self._waiting.popleft()
            requests = [replace(self._requests[n], ids=self._requests[n].ids[begin:end]) for n, begin, end in slices]
            self._under_way.append((slices, self._submit(Gather(requests))))

    def _put(self, found: dict[str, Array], name: str, values: Array, begin: int, count: int) -> None:
        """Put rows of an attribute, from row ``begin`` on, to those of the other pieces, ``count`` in all."""
        if len(values) == count:
            found[name] = values
            return
        whole = found.get(name)
        if whole is None:
            whole = found[name] = slabs.empty((count, *values.shape[1:]), values.dtype)
        if (whole.dtype, whole.shape[1:]) != (values.dtype, values.shape[1:]):
            raise WireError(
                f"rows of {name} came as {whole.dtype} {whole.shape[1:]} and as {values.dtype} {values.shape[1:]}"
            )
        whole[begin : begin + len(values)] = values


def cut_requests(requests: Sequence[RowRequest], most: int) -> Iterator[list[_RowSlice]]:
    """Cut requests, in order, into pieces of at most ``most`` rows. A request without rows has an empty slice."""
    piece: list[_RowSlice] = []
    room = most
    for number, request in enumerate(requests):
        begin, count = 0, len(request.ids)
        while True:
            end = min(count, begin + room)
            piece.append((number, begin, end))
            room -= end - begin
            begin = end
            if room == 0 and not (begin == count and number + 1 == len(requests)):
                yield piece
                piece, room = [], most
            if begin == count:
                break
    if piece:
        yield piece


class _PendingReply(Generic[A]):
    """A reply that may not have arrived yet. Any thread may wait for it."""

    def __init__(self, client: HostClient, channel: Channel, call: Call, read: Callable[[Message], A]):
        self._client, self._channel, self._call, self._read = client, channel, call, read
        self._asked_at = time.monotonic()
        self.received = 0  #: bytes of the reply, once received

    def result(self, timeout: float | None = None) -> A:
        """Wait for the reply, for at most ``timeout`` seconds (default: the client's deadline).

        Raises ``ServiceError`` with the server and the cause. The error is a ``ServerGone`` if the server was
        unreachable for ``gone_after`` seconds, so that another server can be asked.
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
            self._channel.send(acknowledgement(self._call.request_id))
        if reply.status != Status.OK or reply.kind != self._call.request.kind:
            failure = Failure(f"a reply of kind {reply.kind.name.lower()}")
            if reply.status == Status.ERROR:
                failure = reply.failure
            raise ServiceError(f"{self._client.name}: {kind} failed: {failure.cause}", wait=failure.wait)
        try:
            return self._read(reply)
        except WireError as error:
            raise ServiceError(f"{self._client.name}: invalid reply to {kind}: {error}") from None


class HostClient(GraphAccess):
    """Client of one graph server. Thread-safe.

    Each thread has its own connection. After a connection is lost, requests are sent again.
    """

    def __init__(
        self, place: ServerAddress, deadline: float, keys: ServiceKeys | None = None, *, route: bool = False,
        gone_after: float | None = None, wire_rows: WireRows = "stored",
    ):  # fmt: skip
        """Make a client, which connects at the first request.

        ``route``: ask the server to answer for the whole graph, not only for its own parts. ``gone_after``: seconds
        without a connection after which ``ServerGone`` is raised; None: wait until the deadline. ``wire_rows``: dtype
        to which the server rounds floating-point rows for sending.
        """
        self.place = place
        self.deadline = deadline  #: seconds that a reply may take
        self._keys, self._gone_after = keys, gone_after
        self._flags = Flag(Flag.ROUTE * route | FLAG_OF[wire_rows])
        self._row_sizes: _RowSizes = {}
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
        if not self.place.name:
            return f"graph server at {self.endpoint}"
        parts = ",".join(map(str, self.part_ids))
        return f"graph server of {self.place.name} at {self.endpoint}, parts {parts}"

    @property
    def bytes_received(self) -> int:
        with self._lock:
            return sum(channel.bytes_received for channel in self._channels)

    def submit(self, request: Request[A]) -> PendingAnswer[A]:
        """Send a request, one of attributes in pieces. A batch is acknowledged when it has arrived."""
        if isinstance(request, Gather):
            return RowsInPieces(request.requests, self._submit, self._row_sizes)  # type: ignore[return-value]
        return self._submit(request)

    def ask(self, request: Request[A]) -> A:
        """Send a request and wait for the answer. Raises ``ServiceError``.

        Unless the server routes, it must own all that is asked for.
        """
        return self.submit(request).result()

    def greet(self) -> PendingAnswer[HelloInfo]:
        return self.submit(Hello())

    def close(self) -> None:
        """Close all connections. Waiting threads raise ``ServiceError``."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def check_open(self) -> None:
        if self._closed:
            raise ServiceError(f"{self.name}: the client was closed")

    def no_answer(self, kind: str, seconds: float, state: str, gone: bool) -> ServiceError:
        advice = "check that a graph server runs there and admits this key (gnnfleet serve key)"
        if self.place.name:
            advice = f"check that its process is alive: see logs/server.log of {self.place.name}"
        place, seconds = self.place, round(seconds, 1)
        node = None if place.cluster else place.node_rank
        return (ServerGone if gone else ServiceError)(
            f"{self.name}: no answer within {seconds:g} s to {kind} ({state}); {advice}",
            wait=Wait("server", seconds, kind, node, place.cluster and place.name) if place.name else None,
        )

    def _submit(self, request: Request[A]) -> _PendingReply[A]:
        channel: Channel | None = getattr(self._own, "channel", None)
        if channel is None:
            channel = self._own.channel = self._take_channel()
        self.check_open()
        try:
            return _PendingReply(self, channel, channel.submit(request.message(self._flags)), request.read_reply)
        except WireError as error:
            raise ServiceError(f"{self.name}: the request cannot be sent: {error}") from None

    def _take_channel(self) -> Channel:
        # A connection shared through an I/O thread took twice as long for a small request (measured).
        with self._lock:
            self.check_open()
            for channel in self._channels:
                if not channel.owner.is_alive():
                    channel.owner = threading.current_thread()
                    return channel
            self._channels.append(Channel(self.endpoint, self._keys, self._gone_after))
            return self._channels[-1]
