"""Tests of memory that processes of a host share; kernels run in numba's simulator, in one process per rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forked import REPOSITORY, fork
from ports import free_port
from train_kit import command_line, curve, finish_all, job, rank_environment, run_ranks, write_parts
from trainer.cuda.shared_memory import SharedArray, map_shared, mutual_groups

SMALL = {"num_nodes": 60, "avg_degree": 4, "num_features": 5}

_SIMULATED = "import numba.core.config as c; c.reload_config(); "
_RUN = "import sys, shared_memory_kit; shared_memory_kit.main(*sys.argv[1:])"


def run_case(parts: Path, case: str, world_size: int, simulated: bool = True) -> None:
    """Run a check of ``shared_memory_kit`` in all ranks of a job."""
    for output in run_python(_RUN, [str(parts), case], world_size, simulated):
        assert output.endswith("same\n"), output[-3000:]


def run_python(code: str, words: Sequence[str], world_size: int, simulated: bool) -> list[str]:
    """Run ``code`` with arguments ``words`` in all ranks of a job. Returns what each wrote."""
    port, paths = free_port(), f"{REPOSITORY}:{REPOSITORY / 'tests'}:{Path(__file__).parent}"
    ranks = []
    for rank in range(world_size):
        env = rank_environment(rank, world_size, port, PYTHONPATH=paths)
        if simulated:
            env["NUMBA_ENABLE_CUDASIM"] = "1"
        else:
            del env["CUDA_VISIBLE_DEVICES"]
        ranks.append(fork(["-c", (_SIMULATED if simulated else "") + code, *words], env))
    ended = finish_all(ranks)
    assert all(rank.returncode == 0 for rank in ended), "".join(rank.output[-3000:] for rank in ended)
    return [rank.output for rank in ended]


@pytest.mark.slow
def test_ranks_of_a_host_share_a_copy_and_cache_rows_on_their_devices(tmp_path: Path) -> None:
    run_case(write_parts(tmp_path / "parts", dataset="synthetic-hetero", **SMALL), "shared", 2)


@pytest.mark.slow
def test_ranks_that_cannot_map_each_others_memory_make_copies_of_their_own(tmp_path: Path) -> None:
    run_case(write_parts(tmp_path / "parts", **SMALL), "hosts", 3)


@pytest.mark.slow
def test_training_with_cached_rows_has_the_losses_of_the_cpu(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", **SMALL)
    given: dict[str, Any] = {"batch_size": 6, "fanouts": (2, 2), "eval_batch_size": 18, "hidden": 4}
    cached = job(parts, tmp_path / "cuda", sampling="cuda", device_cache="30%", **given)
    outputs = run_python("import sys; from trainer.cli import main; main(sys.argv[1:])", command_line(cached), 2, True)
    assert "18 rows (0 MB) cached on each device" in outputs[0], outputs[0]
    assert "sampling on the GPU" in outputs[0], outputs[0]
    run_ranks(2, job(parts, tmp_path / "cpu", sampling="cpu", **given))
    assert curve(tmp_path / "cuda") == curve(tmp_path / "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["shared", "hosts"])
def test_gpus_share_a_copy(case: str, tmp_path: Path) -> None:
    run_case(write_parts(tmp_path / "parts", **SMALL), case, 3 if case == "hosts" else 2, simulated=False)


def test_groups_contain_only_ranks_that_can_all_read_each_other() -> None:
    assert mutual_groups([[other for other in range(10) if other != rank] for rank in range(10)]) == [tuple(range(10))]
    assert mutual_groups([[1], [0], [3], [2]]) == [(0, 1), (2, 3)]
    assert mutual_groups([[1, 2], [0, 2], [0]]) == [(0, 1), (2,)], "2 cannot read from 1"
    assert mutual_groups([[], []]) == [(0,), (1,)]


@pytest.mark.parametrize("function", [True, False])
def test_memory_is_shared_until_no_process_uses_it(
    function: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not function:  # as in Pythons that were built with an old glibc
        monkeypatch.delattr(os, "memfd_create")
    with SharedArray.of(np.arange(6, dtype=np.int32).reshape(2, 3)) as shared:
        mapped = map_shared(shared.handle, (2, 3), "int32")
        mapped[1, 2] = 7
        assert shared.values[1, 2] == 7 and mapped[0].tolist() == [0, 1, 2]
    assert mapped[0].tolist() == [0, 1, 2]
    with pytest.raises(OSError):
        map_shared(shared.handle, (2, 3), "int32")
    with (tmp_path / "file").open("w+b") as other, pytest.raises(OSError, match="is not the expected"):
        map_shared((os.getpid(), other.fileno(), shared.handle[2]), (2, 3), "int32")
    assert (tmp_path / "file").stat().st_size == 0
    with SharedArray.new((0, 4), "float32") as empty:
        assert map_shared(empty.handle, (0, 4), "float32").shape == (0, 4)
