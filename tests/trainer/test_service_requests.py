"""Tests of encoded requests and answers of the graph service: every field is kept, invalid messages are refused."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from requests_kit import NODES, PLAIN, WRITES, hops_of_every_kind
from trainer.core.errors import WireError
from trainer.sampler.requests import Endpoints, Gather, HasEdges, SampleHops
from trainer.sampler.types import HopRequest, HopSample, RowRequest, TimeBound
from trainer.service.messages import ToGlobal
from trainer.wire import frames
from trainer.wire.frames import Kind, Message, Status, decode, encode


def sent(message: Message) -> Message:
    return decode([bytes(frame) for frame in encode(message)])


def stored(of, name) -> str:
    return "stored"


def flat(value):
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if isinstance(value, tuple):
        return tuple(map(flat, value))
    if dataclasses.is_dataclass(value):
        return {field.name: flat(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def test_every_combination_of_fields_round_trips() -> None:
    asked = hops_of_every_kind()
    assert len(asked) == 640
    back = SampleHops.read(sent(SampleHops(asked).message())).requests
    assert list(map(flat, back)) == list(map(flat, asked))


@pytest.mark.parametrize("top", [5, 2**31 - 1, 2**31, 2**62])
def test_ids_of_any_width_round_trip(top: int) -> None:
    nodes = np.array([top, 0, 3], np.int64)
    bound = TimeBound(np.array([-top, top, 0]), "year", "node")
    request = HopRequest(WRITES, nodes, 7, 3, 1, trees=nodes, bound=bound, exclude=(nodes, nodes[::-1].copy()))
    message = SampleHops([request]).message()
    assert {array.dtype for array in message.arrays} == {np.dtype(np.int32 if top < 2**31 else np.int64)}
    (back,) = SampleHops.read(sent(message)).requests
    assert flat(back) == flat(request) and back.nodes.flags.writeable
    sample = HopSample(np.array([2, 0, 1], np.int32), nodes, np.array([1, 2, top]))
    asked = SampleHops([_with_edge(request)])
    (answer,) = asked.read_reply(sent(asked.reply(message, [sample], stored)))
    assert answer.counts.tolist() == [2, 0, 1] and answer.src.tolist() == nodes.tolist()
    assert answer.edge is not None and answer.edge.tolist() == [1, 2, top]


def _with_edge(request: HopRequest) -> HopRequest:
    return dataclasses.replace(request, with_edge=True)


def test_arrays_shared_by_requests_are_sent_once_and_shared_on_receipt() -> None:
    bound = TimeBound(np.arange(4), "time", "edge")
    asked = [dataclasses.replace(PLAIN, edge_type=("a", f"r{k}", "b"), bound=bound, trees=NODES) for k in range(50)]
    message = SampleHops(asked).message()
    assert len(message.arrays) == 2
    back = SampleHops.read(sent(message)).requests
    assert {id(request.nodes) for request in back} == {id(back[0].trees)}
    assert len({id(request.bound.times) for request in back}) == 1


def invalid_requests() -> dict[str, list[HopRequest]]:
    short = NODES[:2]
    return {
        "fanout below -1": [dataclasses.replace(PLAIN, fanout=-2)],
        "fanout over int32": [dataclasses.replace(PLAIN, fanout=2**31)],
        "negative shuffle": [dataclasses.replace(PLAIN, shuffle=-1)],
        "fewer trees": [dataclasses.replace(PLAIN, trees=short)],
        "fewer times": [dataclasses.replace(PLAIN, bound=TimeBound(short, "time", "node"))],
        "fewer excluded sources": [dataclasses.replace(PLAIN, exclude=(NODES, short))],
        "sources out of order": [dataclasses.replace(PLAIN, sources=NODES)],
        "node type": [dataclasses.replace(PLAIN, edge_type="paper")],
        "two words": [dataclasses.replace(PLAIN, edge_type=("a", "b"))],
        "time of neither": [dataclasses.replace(PLAIN, bound=TimeBound(NODES, "time", "both"))],
        "key beyond 64 bits": [dataclasses.replace(PLAIN, key=-1)],
        "float nodes": [dataclasses.replace(PLAIN, nodes=NODES * 0.5)],
        "two-dimensional nodes": [dataclasses.replace(PLAIN, nodes=NODES.reshape(2, 2))],
        "more than an answer holds": [PLAIN] * 2049,
    }


@pytest.mark.parametrize("name", invalid_requests())
def test_invalid_requests_are_refused(name: str) -> None:
    message = SampleHops(invalid_requests()[name]).message()
    with pytest.raises(WireError):
        SampleHops.read(message)


@pytest.mark.parametrize("wrong", [-2, 99, -(2**31), 2**64 - 1, "x", 1.5])
def test_references_to_missing_arrays_are_refused(wrong: object) -> None:
    full = hops_of_every_kind()[-1]
    assert all(value is not None for value in vars(full).values())
    message = SampleHops([full]).message()
    SampleHops.read(message)
    for count in range(len(message.arrays)):
        with pytest.raises(WireError, match="but has only"):
            SampleHops.read(dataclasses.replace(message, arrays=message.arrays[:count]))
    ((fields,),) = msgspec.msgpack.decode(message.body)
    body = msgspec.msgpack.encode([[{**fields, "nodes": wrong}]])
    with pytest.raises(WireError, match="but has only"):
        SampleHops.read(dataclasses.replace(message, body=body))


@pytest.mark.parametrize(
    "made",
    [SampleHops([PLAIN]), Gather([RowRequest("a", NODES, ("x",))]), HasEdges(WRITES, NODES, NODES)],
    ids=lambda asked: type(asked).__name__,
)
def test_a_truncated_body_is_refused(made) -> None:
    message = made.message()
    made.read(message)
    for length in range(len(message.body)):
        with pytest.raises(WireError, match="cannot be read"):
            made.read(dataclasses.replace(message, body=message.body[:length]))


def test_a_deep_body_is_refused() -> None:
    for body in (b"\x91" * 100_000, b"\x81\xa1a" * 100_000):
        with pytest.raises(WireError, match="cannot be read"):
            SampleHops.read(Message(Kind.SAMPLE, Status.REQUEST, 1, (), body))


def reply(*arrays: np.ndarray) -> Message:
    return Message(Kind.SAMPLE, Status.OK, 1, arrays)


def test_samples_of_wrong_shape_are_refused() -> None:
    counts, src = np.array([1, 2], np.int32), np.arange(3)
    asked = [dataclasses.replace(PLAIN, nodes=NODES[:2])]
    assert SampleHops(asked).read_reply(reply(counts, src))[0].src.tolist() == [0, 1, 2]
    assert len(SampleHops(asked * 2).read_reply(reply(counts, src, counts, src))) == 2
    wrong = [
        (counts,), (counts, src[:2]), (counts[:1], src), (counts, src, src), (counts, src * 1.0), (-counts, src),
        (counts.astype(np.int64), src), (counts, src.reshape(3, 1)), (counts.reshape(2, 1), src),
    ]  # fmt: skip
    for arrays in wrong:
        with pytest.raises(WireError):
            SampleHops(asked).read_reply(reply(*arrays))
    for arrays in [(counts, src), (counts, src, src[:1]), (counts, src, src * 0.5)]:
        with pytest.raises(WireError):
            SampleHops(list(map(_with_edge, asked))).read_reply(reply(*arrays))


def test_row_requests_round_trip() -> None:
    other = np.array([2**40, 1])
    asked = [
        RowRequest("paper", NODES, ("x", "year")), RowRequest(WRITES, NODES, ("weight",)),
        RowRequest("paper", other, ("x",)), RowRequest("author", other[:0], ("orig_id",)),
    ]  # fmt: skip
    message = Gather(asked).message()
    assert len(message.arrays) == 3
    assert list(map(flat, Gather.read(sent(message)).requests)) == list(map(flat, asked))


def test_rows_are_returned_to_their_requests() -> None:
    asked = [RowRequest("a", NODES, ("x", "y")), RowRequest("a", NODES, ()), RowRequest("a", NODES, ("x",))]
    message = Gather(asked).message()
    there = Gather.read(sent(message))
    rows = [{name: np.full((4, 2), ord(name)) for name in request.attrs} for request in there.requests]
    back = Gather(asked).read_reply(sent(there.reply(message, rows, stored)))
    assert [list(columns) for columns in back] == [["x", "y"], [], ["x"]]
    assert back[0]["y"][0, 0] == ord("y") and back[2]["x"].shape == (4, 2)


def test_rows_of_wrong_shape_are_refused() -> None:
    for arrays in [(), (np.ones((2, 4)),), (np.array(3.0),), (np.ones(4), np.ones(4))]:
        with pytest.raises(WireError):
            Gather([RowRequest("a", NODES, ("x",))]).read_reply(reply(*arrays))


def test_more_rows_than_an_answer_holds_are_refused() -> None:
    most = [RowRequest("a", NODES, ("x",))] * frames.MAX_ARRAYS
    assert len(Gather.read(Gather(most).message()).requests) == frames.MAX_ARRAYS
    with pytest.raises(WireError, match="4097 arrays requested"):
        Gather.read(Gather([*most, most[0]]).message())


def test_endpoints_requests_round_trip() -> None:
    back = Endpoints.read(sent(Endpoints(WRITES, NODES + 2**40).message()))
    assert flat((back.edge_type, back.edges)) == flat((WRITES, NODES + 2**40))
    with pytest.raises(WireError, match="cannot be read"):
        Endpoints.read(sent(ToGlobal("paper", NODES).message()))
    assert flat(back.read_reply(reply(NODES, NODES + 2**40))) == flat((NODES, NODES + 2**40))
    for arrays in ([NODES], [NODES, NODES[1:]], [NODES, NODES * 1.0], [NODES, NODES, NODES]):
        with pytest.raises(WireError):
            back.read_reply(reply(*arrays))


def test_has_edges_requests_round_trip() -> None:
    back = HasEdges.read(sent(HasEdges(WRITES, NODES, NODES + 2**40).message()))
    assert flat((back.edge_type, back.src, back.dst)) == flat((WRITES, NODES, NODES + 2**40))
    with pytest.raises(WireError, match="4 sources, 3 targets"):
        HasEdges.read(sent(HasEdges(WRITES, NODES, NODES[1:]).message()))
    with pytest.raises(WireError, match="cannot be read"):
        HasEdges.read(Message(Kind.HAS_EDGES, Status.REQUEST, 0))
    two = HasEdges(WRITES, NODES[:2], NODES[:2])
    assert two.read_reply(reply(np.array([True, False]))).tolist() == [True, False]
    for array in (np.array([True]), np.array([1, 0]), np.array([[True], [True]])):
        with pytest.raises(WireError):
            two.read_reply(reply(array))


def test_the_largest_head_stays_small_beside_the_largest_array() -> None:
    assert frames.MAX_HEAD < 32 << 20 < frames.MAX_ARRAY
