"""Tests of requests that fetch many rows in pieces: small pieces, few in flight, equal rows."""

from __future__ import annotations

import numpy as np
import pytest

from service_kit import ArithmeticGraph, client_of, rows_of, serving
from trainer.core.errors import WireError
from trainer.core.schema import HOMO_NODE
from trainer.sampler.types import RowRequest
from trainer.service import client as pieces
from trainer.service.client import UNDER_WAY, RowsInPieces, cut_requests


def request(count: int, attrs: tuple[str, ...] = ("x",)) -> RowRequest:
    return RowRequest(HOMO_NODE, np.arange(count), attrs)


class CountedAnswers:
    """Computes each answer when its result is awaited. Counts the answers in flight and their maximum."""

    def __init__(self, answer):
        self.answer, self.under_way, self.most, self.rows = answer, 0, 0, []

    def __call__(self, asked):
        requests = asked.requests
        self.rows.append(sum(len(one.ids) for one in requests))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return _Pending(self, requests)


class _Pending:
    def __init__(self, asked, requests):
        self._asked, self._requests, self.received = asked, requests, 7

    def result(self, timeout=None):
        self._asked.under_way -= 1
        return self._asked.answer(self._requests)


@pytest.mark.parametrize("counts", [(0,), (1,), (7,), (8,), (16, 0), (0, 5, 0, 20, 3), ()])
def test_pieces_cover_all_rows_in_order_with_bounded_size(counts) -> None:
    found = list(cut_requests([request(count) for count in counts], 8))
    for piece in found:
        assert 0 < len(piece) and sum(end - begin for _, begin, end in piece) <= 8
    for number, count in enumerate(counts):
        parts = [part[1:] for piece in found for part in piece if part[0] == number]
        assert parts, "a request without rows is also sent: its answer has the dtypes and widths"
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])] and parts[-1][1] == count
        assert count == 0 or len(parts) <= 2 + count // 8


def test_few_pieces_are_in_flight_and_their_size_follows_the_row_size() -> None:
    sizes, asked = {}, CountedAnswers(ArithmeticGraph().gather)
    wide = [request(40_000, ("wide",))]
    pending = RowsInPieces(wide, asked, sizes)
    assert asked.under_way == UNDER_WAY
    np.testing.assert_array_equal(pending.result()[0]["wide"][:, 1023], np.arange(40_000))
    assert asked.most <= UNDER_WAY and pending.received == 7 * len(asked.rows)
    assert max(asked.rows) * 1024 <= pieces.PIECE, "before the first answer"
    again = CountedAnswers(ArithmeticGraph().gather)
    RowsInPieces(wide, again, sizes).result()
    assert max(again.rows) * 4096 <= pieces.PIECE
    narrow = CountedAnswers(ArithmeticGraph().gather)
    for _ in range(2):
        narrow.rows.clear()
        RowsInPieces([request(100_000)], narrow, sizes).result()
    assert narrow.rows == [100_000]


def test_pieces_of_different_kinds_are_refused() -> None:
    dtypes = iter([np.float32, np.float64] * 20)
    asked = CountedAnswers(lambda requests: [{"x": np.ones((len(one.ids), 2), next(dtypes))} for one in requests])
    with pytest.raises(WireError, match=r"rows of x came as float32 \(2,\) and as float64 \(2,\)"):
        RowsInPieces([request(9_000)], asked, {}).result()


def test_a_server_gives_the_same_rows_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1 << 10)
    ids = np.random.default_rng(0).integers(0, 500, 777)
    with serving() as server, client_of(server.endpoint) as client:
        for _ in range(2):
            found = rows_of(client, ids, ("x", "wide"))
        few = client.gather([request(0), request(3), request(30)])
    for name, values in rows_of(ArithmeticGraph(), ids, ("x", "wide")).items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    assert [one["x"].shape for one in few] == [(0, 2), (3, 2), (30, 2)]
