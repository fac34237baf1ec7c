"""Tests that batches and their requests are encoded and decoded bit for bit."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from load_kit import CITES, WRITES, hetero_data, homo_data, parts_of
from trainer.core.batch_cost import Cost
from trainer.core.errors import ServiceError, SettingsError, WireError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.sampler.subgraph_sampler import BatchWork, SampledBatch, SubgraphSampler
from trainer.sampler.types import EdgeRanges as Places
from trainer.sampler.types import EdgeSet, NodeSet, SampledSubgraph, SampleSettings, SeedSet, TimeRule
from trainer.service import messages
from trainer.service.messages import BatchRequest, ClientName
from trainer.wire.frames import Message, decode, encode

ME = ClientName(2**64 - 1, "run-7/rank3 on gpu2 (pid 811)")
SEEDS = np.array([1, 5, 7, 50, 5])
TIMES = np.array([30, 9, 49, 20, 10])


def sent(message: Message, **options) -> Message:
    return decode([bytes(frame) for frame in encode(message, **options)])


def flat(value):
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return {field.name: flat(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(map(flat, value))
    if isinstance(value, dict):
        return [(key, flat(one)) for key, one in value.items()]
    return value


def work_of(seeds=None, key=2**63 + 5, attrs=None, labels=("", ()), **options):
    fanouts = options.pop("fanouts", {HOMO_EDGE: (4, 3)})
    chosen = SampleSettings(fanouts, **options)
    return BatchWork(chosen, SeedSet({HOMO_NODE: SEEDS}) if seeds is None else seeds, key, attrs or {}, labels)


ALL_OF = {HOMO_NODE: ("x", "image", "flag", "half", "time"), HOMO_EDGE: ("edge_attr",)}
TIMED = SeedSet({HOMO_NODE: SEEDS}, {HOMO_NODE: SEEDS * 3}, {HOMO_NODE: TIMES})
TYPED = SeedSet({"paper": np.array([3, 60, 3]), "author": np.array([7])})
HOMO = {
    "plain": work_of(),
    "attributes and labels": work_of(attrs=ALL_OF, labels=(HOMO_NODE, ("y", "time")), edge_ids=True),
    "no seeds": work_of(SeedSet({HOMO_NODE: SEEDS[:0]}), attrs=ALL_OF, labels=(HOMO_NODE, ("y",))),
    "no hops": work_of(fanouts={HOMO_EDGE: ()}),
    "all neighbours": work_of(fanouts={HOMO_EDGE: (-1, -1)}),
    "replacement": work_of(replace=True),
    "replacement and whole rows": work_of(replace=True, fanouts={HOMO_EDGE: (3, -1, 2)}, edge_ids=True),
    "growing fanouts": work_of(fanouts={HOMO_EDGE: (2, 5)}, edge_ids=True),
    "asked once": work_of(fanouts={HOMO_EDGE: (2, 5)}, ask_again=False, edge_ids=True),
    "weighted": work_of(weight="edge_weight"),
    "disjoint": work_of(SeedSet({HOMO_NODE: SEEDS}, {HOMO_NODE: SEEDS + 2**40}), disjoint=True, edge_ids=True),
    "temporal": work_of(TIMED, time=TimeRule("time", "node")),
    "last by edge": work_of(TIMED, time=TimeRule("edge_time", "edge", last=True), edge_ids=True),
    "induced": work_of(induced=True, edge_ids=True, attrs={HOMO_EDGE: ("edge_attr",)}),
    "excluded": work_of(SeedSet({HOMO_NODE: SEEDS}, exclude={HOMO_EDGE: (SEEDS, SEEDS[::-1].copy())})),
}
HETERO = {
    "typed": work_of(TYPED, fanouts={WRITES: (3, 2), CITES: (2, 2)}, attrs={"paper": ("x",), "venue": ("x",)}),
    "typed, edges": work_of(
        TYPED, fanouts={CITES: (-1, 3)}, edge_ids=True, attrs={CITES: ("edge_attr",)}, labels=("paper", ("y",))
    ),
    "typed, temporal": work_of(
        dataclasses.replace(TYPED, times={"paper": np.array([9, 40, 20]), "author": np.array([50])}),
        fanouts={WRITES: (3, 2), CITES: (2, 2)}, time=TimeRule("time", "node"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def graphs():
    return {"homo": parts_of(homo_data(), 3), "hetero": parts_of(hetero_data(), 3)}


def stored(of, name) -> str:
    return "stored"


def sample(graph, work: BatchWork) -> SampledBatch:
    sampler = SubgraphSampler(graph.access, graph.store.manifest, work.settings, work.attrs, work.labels)
    return sampler.sample(work.seeds, work.key)


@pytest.mark.parametrize("name", [*HOMO, *HETERO])
def test_a_request_and_its_batch_are_decoded_unchanged(graphs, name: str) -> None:
    graph, work = (graphs["homo"], HOMO[name]) if name in HOMO else (graphs["hetero"], HETERO[name])
    asked = BatchRequest(work, ME)
    request = sent(asked.message())
    decoded = BatchRequest.read(request)
    assert decoded.client == ME
    assert flat(decoded.work) == flat(work)
    made = sample(graph, decoded.work)
    frames = [bytes(frame) for frame in encode(asked.reply(request, made, stored))]
    back = asked.read_reply(decode(frames))
    rows = sum(len(next(iter(columns.values()))) for columns in made.rows.values()) + (
        len(work.seeds.nodes[work.labels[0]]) if work.labels[1] else 0
    )
    assert back.cost == Cost(remote_bytes=sum(map(len, frames)), rows=rows, remote_rows=rows)
    assert flat(dataclasses.replace(back, cost=made.cost)) == flat(made)


DTYPES = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")


def column(rows: int):
    """Return a strategy for arrays of ``rows`` rows, of any dtype, with one to three dimensions."""
    shapes = st.lists(st.integers(0, 3), max_size=2).map(lambda more: (rows, *more))
    return st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, shapes))


def columns(rows: int, fixed: tuple[str, ...] = ()):
    names = st.lists(st.sampled_from(["x", "größe", "a b", "y.z"]), max_size=3, unique=True)
    return names.flatmap(lambda more: st.fixed_dictionaries({name: column(rows) for name in (*fixed, *more)}))


def int64s(size: int, low=-(2**63), high=2**63 - 1):
    return arrays.arrays("i8", size, elements=st.integers(low, high))


def places(draw, targets: int, edges: int) -> Places:
    count = draw(arrays.arrays("i4", targets, elements=st.integers(0, edges)))
    return Places(np.array([draw(st.integers(0, edges - int(c))) for c in count], np.int64), count)


@st.composite
def sampled(draw):
    hops, induced, disjoint = draw(st.integers(0, 3)), draw(st.booleans()), draw(st.booleans())
    nodes, edges = {}, {}
    for of in draw(st.lists(st.sampled_from(["a", "b", "c.d"]), min_size=1, max_size=3, unique=True)):
        per_hop = tuple(draw(st.lists(st.integers(0, 3), min_size=hops + 1, max_size=hops + 1)))
        tree = draw(arrays.arrays("i4", sum(per_hop))) if disjoint else None
        nodes[of] = NodeSet(draw(int64s(sum(per_hop))), per_hop, tree)
    for relation in draw(st.lists(st.sampled_from(["to", "at"]), max_size=2, unique=True)):
        src, dst = draw(st.sampled_from(list(nodes))), draw(st.sampled_from(list(nodes)))
        number = draw(st.integers(0, 6)) if len(nodes[src].ids) else 0
        ends = draw(arrays.arrays("i4", number, elements=st.integers(0, max(0, len(nodes[src].ids) - 1))))
        targets = draw(st.integers(0, len(nodes[dst].ids)))
        drawn = places(draw, targets, number)
        edges[src, relation, dst] = EdgeSet(
            tuple(draw(st.lists(st.integers(-1, 2**31 - 1), min_size=hops, max_size=hops))), drawn.begin, drawn.count,
            ends, draw(st.none() | int64s(number)), tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            draw(st.sampled_from([None, places(draw, targets, number)])),
        )  # fmt: skip
    found = {of: len(one.ids) for of, one in nodes.items()}
    found |= {of: len(one.edge) for of, one in edges.items() if one.edge is not None}
    rows = {of: draw(columns(number, ("orig_id",))) for of, number in found.items()}
    seeds = SeedSet({of: draw(int64s(one.per_hop[0])) for of, one in nodes.items()})
    label_type = draw(st.sampled_from(list(nodes)))
    labels = draw(columns(len(seeds.nodes[label_type])))
    fanouts = {("a", "to", "a"): (1,) * hops} if hops else {}
    attrs = {of: tuple(name for name in one if name != "orig_id") for of, one in rows.items()}
    work = BatchWork(SampleSettings(fanouts, induced=induced), seeds, 1, attrs, (label_type, tuple(labels)))
    return SampledBatch(SampledSubgraph(hops, nodes, edges, induced), rows, labels, 0), work


@settings(max_examples=60, deadline=None)
@given(sampled())
def test_any_batch_is_decoded_bit_for_bit(made_of) -> None:
    made, work = made_of
    asked = BatchRequest(work, ME)
    request = sent(asked.message())
    assert flat(BatchRequest.read(request).work) == flat(work)
    back = asked.read_reply(sent(asked.reply(request, made, stored)))
    assert flat(dataclasses.replace(back, cost=made.cost)) == flat(made)


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        (work_of(SeedSet({HOMO_NODE: np.zeros(messages.MAX_SEEDS + 1, np.int64)})), "at most 1048576"),
        (work_of(fanouts={HOMO_EDGE: (1,) * 65}), "at most 64 hops"),
        (work_of(fanouts={HOMO_EDGE: (2**31,)}), "fanouts"),
        (work_of(fanouts={HOMO_EDGE: (-2,)}), "fanouts"),
        (work_of(SeedSet({HOMO_NODE: SEEDS}, {HOMO_NODE: SEEDS[1:]})), "one tree or time for each seed"),
        (work_of(SeedSet({HOMO_NODE: SEEDS}, times={"other": SEEDS})), "one tree or time for each seed"),
        (
            work_of(SeedSet({HOMO_NODE: SEEDS}, exclude={HOMO_EDGE: (SEEDS, SEEDS[1:])})),
            "different numbers of targets and sources",
        ),
        (work_of(labels=("other", ("y",))), "which has no seeds"),
    ],
)
def test_requests_beyond_the_limits_are_refused(work: BatchWork, cause: str) -> None:
    with pytest.raises(WireError, match=cause):
        BatchRequest.read(sent(BatchRequest(work, ME).message()))


@pytest.mark.parametrize("name", ["x" * 201, "bell\a", "\x1b[31mred"])
def test_client_names_must_be_printable(name: str) -> None:
    with pytest.raises(WireError, match="printable"):
        BatchRequest.read(sent(BatchRequest(work_of(), ClientName(1, name)).message()))


def test_damaged_requests_raise_only_wire_errors() -> None:
    rng = random.Random(0)
    works = [*HOMO.values(), *HETERO.values()]
    refused = 0
    for number in range(2000):
        message = BatchRequest(works[number % len(works)], ME).message()
        body = bytearray(message.body)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.choice((0, 1, 2, 3, 7, 127, 128, 255))
        if rng.random() < 0.2:
            del body[rng.randrange(len(body)) :]
        try:
            BatchRequest.read(dataclasses.replace(message, body=bytes(body)))
        except WireError:
            refused += 1
    assert refused > 1000


def test_damaged_batches_raise_service_errors_or_index_within_their_arrays(graphs) -> None:
    rng, work = random.Random(1), HOMO["attributes and labels"]
    asked = BatchRequest(work, ME)
    good = asked.reply(asked.message(), sample(graphs["homo"], work), stored)
    refused = 0
    for _ in range(1500):
        body = bytearray(good.body)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(30)
        arrays = list(good.arrays)
        if rng.random() < 0.3:
            arrays[rng.randrange(len(arrays))] = np.array([5, -1], np.int32)
        try:
            back = asked.read_reply(dataclasses.replace(good, body=bytes(body), arrays=tuple(arrays)))
        except ServiceError:
            refused += 1
        else:
            edges = back.subgraph.edges[HOMO_EDGE]
            assert edges.src.max(initial=0) < len(back.subgraph.nodes[HOMO_NODE].ids)
            assert (edges.row_begin + edges.row_count).max(initial=0) <= len(edges.src)
    assert refused > 1100


def test_a_batch_of_other_seeds_is_refused(graphs) -> None:
    work = HOMO["plain"]
    asked = BatchRequest(work, ME)
    reply = sent(asked.reply(asked.message(), sample(graphs["homo"], work), stored))
    fewer = dataclasses.replace(work, seeds=SeedSet({HOMO_NODE: SEEDS[:4]}))
    more = dataclasses.replace(work, attrs={HOMO_NODE: ("x",)})
    deeper = dataclasses.replace(work, settings=SampleSettings({HOMO_EDGE: (4, 3, 2)}))
    for other, cause in (
        (fewer, "does not begin with the requested seeds"),
        (more, "rows"),
        (deeper, "2 hops .* expected 3"),
    ):
        with pytest.raises(WireError, match=cause):
            BatchRequest(other, ME).read_reply(reply)


@pytest.mark.parametrize("change", [lambda time: time - 0.5, lambda time: time[:, None]])
def test_times_of_seeds_are_whole_numbers_one_for_each(change) -> None:
    # -0.5 would become 0, and the seed would see edges of its future; NaN would become the earliest time of all.
    data = homo_data()
    data.time = change(data.time)
    settings = LoaderSettings("train", (2,), 4, time_attr="edge_time")
    with pytest.raises(SettingsError, match=r"times 'time' of node are .*; expected one integer per node"):
        BatchLoader(parts_of(data, 1), settings, 0, RankLayout.single(1))
