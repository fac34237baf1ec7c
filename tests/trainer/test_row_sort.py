"""Tests of the counting sort that orders records by row, in memory and with temporary files."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.row_sort import Column, Scratch, sorted_rows
from trainer.data.edges import joint_adjacency


def records_of(rows, columns, at_once):
    for start in range(0, len(rows), at_once):
        yield rows[start : start + at_once], [column[start : start + at_once] for column in columns]


@pytest.mark.parametrize("memory", [None, 0, 100, 1 << 20])
@given(rows=st.lists(st.integers(0, 9), max_size=80), at_once=st.integers(1, 50), more=st.integers(0, 3))
def test_records_are_sorted_by_row_and_stay_in_order_within_a_row(tmp_path_factory, memory, rows, at_once, more):
    rows, num_rows = np.array(rows, np.int32), 10 + more
    columns = [np.arange(len(rows)), np.random.default_rng(0).random((len(rows), 3), np.float32)]
    indptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=indptr[1:])
    folder: Path = tmp_path_factory.mktemp("sort")
    scratch = None if memory is None else Scratch(folder, memory)
    found: list[list[np.ndarray]] = [[], []]
    next_row = 0
    for group in sorted_rows(indptr, [*map(Column.of, columns)], lambda: records_of(rows, columns, at_once), scratch):
        assert group.first == next_row
        next_row += len(group.limits) - 1
        assert (group.limits == indptr[group.first : next_row + 1] - indptr[group.first]).all()
        for values, column in zip(found, group.columns, strict=True):
            values.append(column())
    assert next_row == num_rows
    assert list(folder.iterdir()) == []
    order = np.argsort(rows, kind="stable")
    for values, column in zip(found, columns, strict=True):
        assert (np.concatenate(values) == column[order]).all()


def test_many_columns_and_ranges_need_few_files_and_little_memory(tmp_path, monkeypatch):
    # a file for each column and range would be hundreds
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rows = np.random.default_rng(0).integers(0, 2000, 20_000)
    indptr = np.zeros(2001, np.int64)
    np.cumsum(np.bincount(rows, minlength=2000), out=indptr[1:])
    columns = [np.arange(len(rows)) * k for k in range(20)]
    order, memory = np.argsort(rows, kind="stable"), 1 << 16
    list(sorted_rows(indptr, [Column.of(rows)], lambda: records_of(rows, [rows], 9999), Scratch(tmp_path, memory)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    tracemalloc.start()
    try:
        groups, count, at = (
            sorted_rows(
                indptr,
                [*map(Column.of, columns)],
                lambda: records_of(rows, columns, len(rows)),
                Scratch(tmp_path, memory),
            ),
            0,
            0,
        )
        for group in groups:
            count, of = count + 1, order[at : at + int(group.limits[-1])]
            at += len(of)
            assert all((column()[:] == of * k).all() for k, column in enumerate(group.columns))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert at == len(rows) and count > 5 and peak < 4 * memory


def test_ranges_take_no_more_than_their_memory(tmp_path):
    rows = np.random.default_rng(0).integers(0, 1000, 100_000)
    indptr = np.zeros(1001, np.int64)
    np.cumsum(np.bincount(rows, minlength=1000), out=indptr[1:])
    groups = sorted_rows(
        indptr, [Column(rows.dtype)], lambda: records_of(rows, [rows], 1 << 16), Scratch(tmp_path, 1 << 17)
    )
    sizes = [int(group.limits[-1]) for group in groups]
    assert sum(sizes) == 100_000 and len(sizes) > 10
    assert max(sizes) * 32 <= 1 << 17


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(seed=st.integers(0, 1000))
def test_the_adjacency_built_by_way_of_files_is_that_built_in_memory(tmp_path_factory, dtype, seed):
    rng = np.random.default_rng(seed)
    lists = [(rng.integers(0, 20, (2, 90)).astype(dtype), 0, 0), (rng.integers(0, 10, (2, 60)).astype(dtype), 20, 5)]
    folder = tmp_path_factory.mktemp("adjacency")
    indptr, neighbours = joint_adjacency(lists, 40)
    indptr_on_disk, on_disk = joint_adjacency(lists, 40, scratch=Scratch(folder, 400))
    assert (indptr_on_disk == indptr).all() and (on_disk == neighbours).all() and on_disk.dtype == neighbours.dtype
    assert isinstance(on_disk, np.memmap) and len(list(folder.iterdir())) == 1
