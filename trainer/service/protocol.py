"""Requests and replies as typed values, to and from wire messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trainer.arrays import Array, Ids
from trainer.errors import WireError
from trainer.sample.types import HopRequest, HopSample
from trainer.service.wire import MAX_ARRAYS, Kind, Message, Status, check_ids, narrow_ids, widen_ids

_REPLACE, _WITH_EDGE_ID = 1, 2
_MAX_FANOUT = (1 << 31) - 1  # counts are int32


@dataclass(frozen=True)
class HelloInfo:
    """Who a graph server is."""

    node_rank: int
    host: str
    part_ids: tuple[int, ...]
    manifest_digest: str  #: sha256 of its manifest.json, hex


@dataclass(frozen=True)
class ServerStats:
    """Counters of a graph server since its start."""

    requests: int  #: answered, errors included
    errors: int  #: answered with an error
    malformed: int  #: dropped without an answer
    refused: int  #: connections that failed authentication or were no ZeroMQ peers
    bytes_in: int
    bytes_out: int
    seconds: Mapping[str, float]  #: time in handlers per kind, summed over threads


def sample_request(request: HopRequest) -> Message:
    """The message asking for one hop; its request id is still 0."""
    flags = _REPLACE * request.replace | _WITH_EDGE_ID * request.with_edge_id
    return Message(
        kind=Kind.SAMPLE_HOP,
        status=Status.REQUEST,
        request_id=0,
        arrays=(narrow_ids(request.nodes),),
        fanout=request.fanout,
        shuffle=request.shuffle,
        key=int(request.key),
        flags=flags,
    )


def read_sample_request(message: Message) -> HopRequest:
    """Raises ``WireError`` unless the message is a complete request."""
    if len(message.arrays) != 1 or not -1 <= message.fanout <= _MAX_FANOUT:
        raise WireError(f"sample_hop with {len(message.arrays)} arrays, fanout {message.fanout}")
    if message.shuffle < 0 or message.flags > (_REPLACE | _WITH_EDGE_ID):
        raise WireError(f"sample_hop with shuffle {message.shuffle}, flags {message.flags}")
    return HopRequest(
        nodes=widen_ids(message.arrays[0]),
        fanout=message.fanout,
        shuffle=message.shuffle,
        key=message.key,
        replace=bool(message.flags & _REPLACE),
        with_edge_id=bool(message.flags & _WITH_EDGE_ID),
    )


def sample_arrays(sample: HopSample) -> list[Array]:
    """The arrays of the reply to ``sample_hop``."""
    edge_id = [] if sample.edge_id is None else [narrow_ids(sample.edge_id)]
    return [sample.counts, narrow_ids(sample.src), *edge_id]


def read_sample(message: Message, num_nodes: int, with_edge_id: bool) -> HopSample:
    """Raises ``WireError`` when the reply does not fit a request of ``num_nodes`` nodes."""
    if len(message.arrays) != 2 + with_edge_id:
        raise WireError(f"a sample of {len(message.arrays)} arrays")
    counts, src, *rest = message.arrays
    if counts.dtype != np.int32 or counts.shape != (num_nodes,) or (num_nodes and counts.min() < 0):
        raise WireError(f"counts of dtype {counts.dtype} and shape {counts.shape} for {num_nodes} nodes")
    sample = HopSample(counts, check_ids(src), widen_ids(rest[0]) if rest else None)
    if any(len(ids) != counts.sum(dtype=np.int64) for ids in (src, *rest)):
        raise WireError(f"{len(src)} neighbours, counts add up to {counts.sum(dtype=np.int64)}")
    return sample


def gather_request(nodes: Ids, attrs: Sequence[str]) -> Message:
    """The message asking for rows; its request id is still 0."""
    return Message(Kind.GATHER, Status.REQUEST, 0, (narrow_ids(nodes),), "\n".join(attrs))


def read_gather_request(message: Message) -> tuple[Ids, list[str]]:
    """Node ids and attribute names. Raises ``WireError`` unless the message is a complete request."""
    attrs = message.text.split("\n") if message.text else []
    if len(message.arrays) != 1 or len(attrs) > MAX_ARRAYS:
        raise WireError(f"gather with {len(message.arrays)} arrays and {len(attrs)} names")
    return widen_ids(message.arrays[0]), attrs


def read_rows(message: Message, num_nodes: int, attrs: Sequence[str]) -> dict[str, Array]:
    """Raises ``WireError`` unless there is one array of ``num_nodes`` rows per attribute."""
    if len(message.arrays) != len(attrs) or any(array.shape[:1] != (num_nodes,) for array in message.arrays):
        raise WireError(f"rows of shapes {[array.shape for array in message.arrays]} for {num_nodes} nodes")
    return dict(zip(attrs, message.arrays, strict=True))


def info_text(info: HelloInfo | ServerStats) -> str:
    """JSON for the text of a reply to ``hello`` or ``stats``."""
    return json.dumps(asdict(info))


def read_hello(message: Message) -> HelloInfo:
    """Raises ``WireError`` unless the reply describes a server."""
    fields = _json_object(message)
    try:
        parts = tuple(int(part) for part in fields["part_ids"])
        return HelloInfo(int(fields["node_rank"]), str(fields["host"]), parts, str(fields["manifest_digest"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a hello that cannot be understood: {error!r}") from None


def read_stats(message: Message) -> ServerStats:
    """Raises ``WireError`` unless the reply holds exactly the counters."""
    try:
        return ServerStats(**_json_object(message))
    except TypeError as error:
        raise WireError(f"stats that cannot be understood: {error}") from None


def _json_object(message: Message) -> dict[str, Any]:
    try:
        value = json.loads(message.text)
    except ValueError as error:
        raise WireError(f"text that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError("text that is not a JSON object")
    return value
