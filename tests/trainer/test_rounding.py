"""Tests of rows that are stored or sent in lower precision: error bounds, exact attributes, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from graphs import skewed
from partition_kit import with_nodes
from service_kit import client_of, rows_of, serving
from trainer.core.errors import DataError, PartitionError, WireError
from trainer.core.rounding import from_int8, rounds, row_bytes, take_scaled, to_float16, to_int8
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.partition.inspect import describe
from trainer.partition.methods.assign import assign_parts
from trainer.partition.verify import verify_partition
from trainer.partition.write import write_partition
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.requests import Gather
from trainer.sampler.types import RowRequest
from trainer.store.manifest import read_manifest
from trainer.store.part_store import open_parts
from trainer.wire import columns
from trainer.wire.frames import Flag, Message, decode, encode
from trainer.wire.request import pack

SINGLES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=9),
                     elements=st.floats(-(2.0**80), 2.0**80, width=32))  # fmt: skip


@settings(deadline=None, max_examples=60)
@drawn(SINGLES)
def test_the_int8_error_is_at_most_half_a_scale_and_rounding_is_idempotent(rows) -> None:
    codes, scales = to_int8(rows)
    back = from_int8(codes, scales)
    wide = scales.reshape(-1, *[1] * (rows.ndim - 1)).astype(np.float64)
    assert (abs(back.astype(np.float64) - rows) <= wide * 0.5001 + 1e-37).all()
    again = to_int8(back)
    if np.abs(rows).max(initial=1.0) > 1e-30:
        np.testing.assert_array_equal(from_int8(*again), back)


def test_rounding_twice_gives_the_same_codes_and_scales() -> None:
    rows = np.random.default_rng(1).lognormal(0, 4, (20_000, 7)).astype(np.float32)
    codes, scales = to_int8(rows)
    for had, has in zip((codes, scales), to_int8(from_int8(codes, scales)), strict=True):
        np.testing.assert_array_equal(had, has)


def test_zeros_and_the_largest_value_stay_exact() -> None:
    rows = np.array([[0, 0, 0], [-2.54, 1.27, 0], [0, 0, 1e-45]], np.float32)
    codes, scales = to_int8(rows)
    assert scales[0, 0] == 0 and codes.tolist()[:2] == [[0, 0, 0], [-127, 64, 0]]
    np.testing.assert_allclose(from_int8(codes, scales)[1], [-2.54, 1.28, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_float_dtype_and_any_memory_layout_rounds_alike(dtype) -> None:
    rows = np.random.default_rng(2).normal(size=(300, 2, 1100)).astype(dtype)[:, :, ::2]
    codes, scales = to_int8(rows)
    plain_codes, plain_scales = to_int8(np.ascontiguousarray(rows, np.float32))
    np.testing.assert_array_equal(codes, plain_codes)
    np.testing.assert_array_equal(scales, plain_scales)
    assert from_int8(codes, scales, dtype).dtype == dtype and codes.shape == rows.shape


def test_float16_equals_numpy() -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, 200_000, np.uint32)
    every_half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    above = np.nextafter(every_half[np.isfinite(every_half)], np.float32(9e4))
    values = np.concatenate([bits.view(np.float32), every_half, above])
    values = values[~np.isnan(values) & ((abs(values) < 65520) | np.isinf(values))][:, None]
    np.testing.assert_array_equal(to_float16(values).view(np.uint16), values.astype(np.float16).view(np.uint16))
    assert np.isnan(to_float16(np.array([[np.nan, -np.nan]], np.float32))).all()


@pytest.mark.parametrize(
    ("to", "value", "dtype", "cause"),
    [
        (to_int8, np.nan, np.float32, "row 3 holds inf or NaN"),
        (to_int8, -np.inf, np.float64, "row 3 holds inf or NaN"),
        (to_int8, 1e300, np.float64, "row 3 holds inf or NaN"),
        (to_float16, 65520, np.float32, "row 3 holds a number beyond 65504"),
        (to_float16, -1e30, np.float64, "row 3 holds a number beyond 65504"),
    ],
)
def test_values_out_of_range_are_refused_with_their_row(to, value, dtype, cause) -> None:
    rows = np.ones((5, 300_000 if dtype == np.float64 else 3), dtype)  # the wide rows are converted row by row
    rows[3, 1] = value
    with pytest.raises(DataError, match=cause):
        to(rows)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "form", "size"),
    [
        ("x", np.float32, (9, 100), "float16", 200),
        ("x", np.float32, (9, 100), "int8", 104),
        ("x", np.float16, (9, 100), "int8", 104),
        ("x", np.float64, (9, 3, 4), "int8", 16),
        ("x", np.float32, (9, 100), "stored", 400),
        ("x", np.float16, (9, 100), "float16", 200),  # has this dtype already
        ("x", np.float32, (9, 1), "int8", 4),  # the scale alone takes as many bytes
        ("x", np.float32, (9, 0), "int8", 0),
        ("y", np.float32, (9, 100), "int8", 400),  # labels
        ("weight", np.float32, (9,), "int8", 4),
        ("x", np.uint16, (9, 100), "int8", 200),  # bfloat16 bits
        ("x", np.int64, (9, 100), "float16", 800),
        ("x", np.complex64, (9, 100), "float16", 800),
    ],
)
def test_bytes_of_a_row(name, dtype, shape, form, size) -> None:
    assert row_bytes(name, dtype, shape, form) == size
    assert rounds(name, dtype, shape, form) == (size < row_bytes(name, dtype, shape, "stored"))
    column = columns.rounded(name, np.ones(shape, dtype), form)
    sent = [array for array in (column.array, column.scales) if array is not None]
    assert sum(array.nbytes for array in sent) == size * shape[0]
    assert bool(column.mark) == rounds(name, dtype, shape, form)
    np.testing.assert_array_equal(columns.restored(column, set()), np.ones(shape, dtype), strict=True)


def test_rows_stored_as_int8_are_gathered_like_others() -> None:
    rows = np.random.default_rng(4).normal(size=(50, 6)).astype(np.float32)
    codes, scales = to_int8(rows)
    out, ids, at = np.zeros((4, 6), np.float32), np.array([7, 49, 7]), np.array([3, 0, 1])
    take_scaled(codes, scales, ids, at, out)
    np.testing.assert_array_equal(out[at], from_int8(codes, scales)[ids])
    assert not out[2].any()


ASKED = Gather([RowRequest(HOMO_NODE, np.arange(4), ("x", "y", "z"))])
ROWS = [{"x": np.ones((4, 3), np.float32), "y": np.arange(4), "z": np.full((4, 2, 5), 2.0)}]


def answer(form, rows=ROWS) -> Message:
    asked = ASKED.message(columns.FLAG_OF[form])
    made = ASKED.reply(asked, rows, lambda of, name: columns.form_of(asked.flags))
    return decode([bytes(frame) for frame in encode(made)])


@pytest.mark.parametrize("form", ["stored", "float16", "int8"])
def test_an_answer_restores_the_stored_dtypes(form) -> None:
    (back,) = ASKED.read_reply(answer(form))
    for name, values in ROWS[0].items():
        np.testing.assert_array_equal(back[name], values, strict=True)


def test_int8_wins_over_float16() -> None:
    assert columns.form_of(Flag.INT8 | Flag.FLOAT16 | Flag.ROUTE) == "int8"
    assert columns.form_of(Flag.ROUTE) == "stored"


def test_rows_that_cannot_be_sent_are_refused_with_the_remedy() -> None:
    broken = [{**ROWS[0], "x": np.full((4, 3), np.nan, np.float32)}]
    with pytest.raises(DataError, match="rows of x cannot be sent as int8: row 0 holds inf or NaN.*--wire-rows stored"):
        answer("int8", broken)


def codes(rows=4, dtype=np.int8):
    return np.ones((rows, 3), dtype)


@pytest.mark.parametrize(
    ("mark", "arrays"),
    [
        (4, [codes()]),  # without scales
        (4, [codes(), np.ones(4, np.float32)]),
        (4, [codes(), np.ones((3, 1), np.float32)]),
        (4, [codes(), np.ones((4, 1), np.float64)]),
        (4, [codes(), np.full((4, 1), np.inf, np.float32)]),
        (4, [codes(dtype=np.float16), np.ones((4, 1), np.float32)]),
        (4, [np.ones(4, np.int8), np.ones((4, 1), np.float32)]),
        (1, [codes()]),
        (1, [np.ones(4, np.float16)]),
        (6, [codes()]),
        (255, [codes()]),
        (5, [np.broadcast_to(np.int8(1), (4, 1 << 26)), np.ones((4, 1), np.float32)]),  # 2 GiB when decoded
    ],
)
def test_hostile_answers_are_refused_before_allocation(mark, arrays) -> None:
    asked = Gather([RowRequest(HOMO_NODE, np.arange(4), ("x",))])
    reply = asked.message().reply(*pack([{"x": columns.Column(mark, *arrays)}]))
    with pytest.raises(WireError):
        asked.read_reply(reply)


def test_rounded_rows_are_restored_once() -> None:
    # Restoring one array many times could take much more memory than the message.
    column = columns.Column(1, np.ones((4, 3), np.float16))
    asked = Gather([RowRequest(HOMO_NODE, np.arange(4), ("x", "y"))])
    reply = asked.message().reply(*pack([{"x": column, "y": column}]))
    with pytest.raises(WireError, match="same array"):
        asked.read_reply(reply)


def dataset():
    draw = np.random.default_rng(5)
    base = skewed(60, 400)
    nodes = {"x": draw.normal(size=(60, 8)), "y": draw.normal(size=(60, 3)), "one": draw.normal(size=60)}
    edges = {"vector": draw.normal(size=(base.num_edges, 2, 3)).astype(np.float32), "flag": np.ones(base.num_edges)}
    data = base.edges[HOMO_EDGE]
    return with_nodes(replace(base, edges={HOMO_EDGE: replace(data, attrs=edges)}), HOMO_NODE, attrs=nodes)


def all_rows(store):
    found, local = {}, LocalGraph(store)
    for of, names in ((HOMO_NODE, ("x", "y", "one")), (HOMO_EDGE, ("vector", "flag"))):
        rows = rows_of(local, np.arange(store.books[of].size), ("orig_id", *names), of)
        found |= {name: rows[name][np.argsort(rows["orig_id"])] for name in names}
    return found


@pytest.mark.parametrize(("form", "dtype", "off"), [("float16", np.float16, 0.002), ("int8", np.float32, 0.02)])
def test_a_partition_rounds_features_and_nothing_else(tmp_path, form, dtype, off) -> None:
    given, parts = dataset(), tmp_path / "parts"
    made = write_partition(given, assign_parts(given, 3, "random", 0), parts, form)
    assert verify_partition(parts) == [] and read_manifest(parts) == made and made.options["rows"] == form
    back = all_rows(open_parts(parts))
    nodes, edges = given.nodes[HOMO_NODE].attrs, given.edges[HOMO_EDGE].attrs
    for name, values in (("x", nodes["x"]), ("vector", edges["vector"])):
        assert back[name].dtype == dtype and 0 < abs(back[name] - values).max() < off
    for name, values in (("y", nodes["y"]), ("one", nodes["one"]), ("flag", edges["flag"])):
        np.testing.assert_array_equal(back[name], values, strict=True)
    one = write_partition(given, assign_parts(given, 1, "random", 0), tmp_path / "one", form)
    assert one.fingerprint != write_partition(given, assign_parts(given, 1, "random", 0), tmp_path / "as").fingerprint
    for name, values in all_rows(open_parts(tmp_path / "one")).items():
        np.testing.assert_array_equal(values, back[name], strict=True)


def test_int8_parts_have_a_newer_format_version_and_are_verified(tmp_path) -> None:
    given, parts = dataset(), tmp_path / "parts"
    write_partition(given, assign_parts(given, 2, "random", 0), parts, "int8")
    raw = json.loads((parts / "manifest.json").read_text())
    assert raw["version"] == 3 and raw["nodes"]["node"]["attrs"]["x"]["kept"] == "int8"
    assert "kept" not in raw["nodes"]["node"]["attrs"]["y"]
    assert describe(parts).nodes["node"].attrs["x"] == "float32 as int8 [60, 8]"
    scales = parts / "part0" / "nodes" / "node" / "scales" / "x.npy"
    broken = np.load(scales)
    broken[2] = -np.inf
    np.save(scales, broken)
    assert "part0/nodes/node/scales/x.npy: position 2: -inf is not a valid scale of a row" in map(
        str, verify_partition(parts, digests=False)
    )
    scales.unlink()
    with pytest.raises(PartitionError, match=r"scales/x.npy is missing"):
        open_parts(parts)


def test_the_default_precision_does_not_change_the_manifest(tmp_path) -> None:
    given = dataset()
    manifest = write_partition(given, assign_parts(given, 2, "random", 0), tmp_path / "parts")
    raw = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert "rows" not in manifest.options and "kept" not in json.dumps(raw)


def test_a_row_that_cannot_be_rounded_is_named_and_no_folder_is_left(tmp_path) -> None:
    given = dataset()
    x = given.nodes[HOMO_NODE].attrs["x"].copy()
    x[41, 2] = 1e6
    given = with_nodes(given, HOMO_NODE, attrs={"x": x})
    with pytest.raises(DataError, match=r"x.npy: row 41 of the dataset holds a number beyond 65504.*--rows stored"):
        write_partition(given, assign_parts(given, 2, "random", 0), tmp_path / "parts", "float16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", ["stored", "int8"])
@pytest.mark.parametrize("form", ["stored", "float16", "int8"])
def test_remote_rows_arrive_in_the_requested_precision(tmp_path, kept, form) -> None:
    # Rows stored as int8 are sent as int8 and decoded like local rows.
    given, parts = dataset(), tmp_path / "parts"
    write_partition(given, assign_parts(given, 2, "random", 0), parts, kept)
    here, whole, ids = open_parts(parts, [0]), LocalGraph(open_parts(parts)), np.arange(60)
    with (
        serving(LocalGraph(open_parts(parts, [1]))) as server,
        client_of(server.endpoint, parts=[1], wire_rows=form) as client,
    ):
        graph = DistGraph(LocalGraph(here), {1: client})
        back, right = (rows_of(one, ids, ("x", "y", "one")) for one in (graph, whole))
        assert {name: rows.dtype for name, rows in back.items()} == {name: rows.dtype for name, rows in right.items()}
        for name in ("y", "one") if kept == "stored" and form != "stored" else ("x", "y", "one"):
            np.testing.assert_array_equal(back[name], right[name])
        assert abs(back["x"] - right["x"]).max() < 0.02
        bytes_of = graph.take_cost().remote_bytes
    remote = 60 - len(here.parts[0].nodes[HOMO_NODE].orig_id)
    wide = {"stored": 64, "float16": 16, "int8": 12}["int8" if kept == "int8" else form]
    assert 0 <= bytes_of - remote * (wide + 24 + 8) < 1500  # message overhead
