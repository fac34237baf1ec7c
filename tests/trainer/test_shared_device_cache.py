"""Tests of cached rows that devices of a host share: kernels run in numba's simulator, in one process per rank."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fake_nvml import FakeNvml, use_nvml
from forked import REPOSITORY, fork
from ports import free_port
from train_kit import command_line, curve, finish_all, job, rank_environment, run_ranks, write_parts
from trainer.core.shared_memory import SharedArray, map_shared, mutual_groups
from trainer.cuda import peer_rows
from trainer.cuda.launch import PeerArray
from trainer.cuda.nvml import NVLINK, READ
from trainer.cuda.peer_links import MOST_DEVICES, device_name, link_between
from trainer.graph.cache_policy import RowCounts

SMALL = {"num_nodes": 60, "avg_degree": 4, "num_features": 5}

_SIMULATED = "import numba.core.config as c; c.reload_config(); "
_RUN = "import sys, shared_cache_kit; shared_cache_kit.main(*sys.argv[1:])"


def run_case(parts: Path, case: str, world_size: int, simulated: bool = True) -> None:
    """Run a check of ``shared_cache_kit`` in all ranks of a job."""
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


def test_devices_cache_different_rows_and_read_each_others(tmp_path: Path) -> None:
    typed = write_parts(tmp_path / "parts", dataset="synthetic-hetero", **SMALL)
    run_case(typed, "shared", 3)


def test_rows_that_cannot_be_read_are_not_shared(tmp_path: Path) -> None:
    run_case(write_parts(tmp_path / "parts", **SMALL), "problems", 2)


def test_the_setting_decides_which_devices_share(tmp_path: Path) -> None:
    run_case(write_parts(tmp_path / "parts", **SMALL), "choices", 3)


def test_ranks_that_cannot_map_each_others_memory_make_copies_of_their_own(tmp_path: Path) -> None:
    run_case(write_parts(tmp_path / "parts", **SMALL), "hosts", 3)


def test_training_with_shared_rows_has_the_losses_of_the_cpu(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", **SMALL)
    given: dict[str, Any] = {"batch_size": 6, "fanouts": (2, 2), "eval_batch_size": 18, "hidden": 4}
    shared = job(
        parts, tmp_path / "cuda", sampling="cuda", device_cache="30%", share_device_cache="always", **given
    )  # fmt: skip
    outputs = run_python("import sys; from trainer.cli import main; main(sys.argv[1:])", command_line(shared), 2, True)
    assert "; the GPUs of ranks 0, 1 read each other's rows" in outputs[0], outputs[0]
    assert "sampling on the GPU" in outputs[0], outputs[0]
    run_ranks(2, job(parts, tmp_path / "cpu", sampling="cpu", **given))
    assert curve(tmp_path / "cuda") == curve(tmp_path / "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["shared", "problems", "hosts"])
def test_gpus_read_each_others_rows(case: str, tmp_path: Path) -> None:
    run_case(write_parts(tmp_path / "parts", **SMALL), case, 3 if case == "hosts" else 2, simulated=False)


def test_groups_contain_only_ranks_that_can_all_read_each_other() -> None:
    everyone = [[other for other in range(10) if other != rank] for rank in range(10)]
    assert mutual_groups(everyone, MOST_DEVICES) == [tuple(range(8)), (8, 9)]
    assert mutual_groups(everyone) == [tuple(range(10))]
    assert mutual_groups([[1], [0], [3], [2]]) == [(0, 1), (2, 3)]
    assert mutual_groups([[1, 2], [0, 2], [0]]) == [(0, 1), (2,)], "2 cannot read from 1"
    assert mutual_groups([[], []]) == [(0,), (1,)]


def test_counts_of_several_ranks_are_added_up() -> None:
    one, other = RowCounts.of([np.array([5, 1, 5])]), RowCounts.of([np.array([9, 5])])
    total = RowCounts.sum([one, other])
    assert total.ids.tolist() == [1, 5, 9] and total.counts.tolist() == [1, 3, 1]


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


def test_the_driver_maps_rows_by_the_handle_of_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rows = importlib.import_module("cuda.bindings.driver"), np.arange(12, dtype=np.float32).reshape(3, 4)
    no_error, failed, opened = real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_MAP_FAILED, []

    def open_handle(handle: Any, flags: int) -> tuple[Any, ...]:
        opened.append((ctypes.string_at(handle.getPtr(), 64), flags))
        return (no_error, rows.ctypes.data) if len(opened) == 1 else (failed, 0)

    def copy(target: int, source: int, size: int) -> tuple[Any]:
        ctypes.memmove(target, source, size)
        return (no_error,)

    @contextmanager
    def driver_on(device: torch.device) -> Iterator[Any]:
        yield SimpleNamespace(
            CUipcMemHandle=real.CUipcMemHandle, CUipcMem_flags=real.CUipcMem_flags, cuIpcOpenMemHandle=open_handle,
            cuMemcpyDtoH=copy,
        )  # fmt: skip

    monkeypatch.setattr(peer_rows, "driver_on", driver_on)
    handle, device = bytes(range(64)), torch.device("cuda", 0)
    mapped = peer_rows.open_rows(handle, 3, 4, device)
    assert mapped == PeerArray(rows.ctypes.data, (3, 4), torch.float32) and opened == [(handle, 1)]
    monkeypatch.setattr(peer_rows, "_gathered_ends", lambda mapped, device: rows[[0, 2]].tobytes())
    assert peer_rows.ends_of(mapped, device) == rows[[0, 2]].tobytes()
    monkeypatch.setattr(peer_rows, "_gathered_ends", lambda mapped, device: bytes(32))
    with pytest.raises(RuntimeError, match="a kernel reads other rows than the driver copies"):
        peer_rows.ends_of(mapped, device)
    with pytest.raises(RuntimeError, match="CUDA driver: CUDA_ERROR_MAP_FAILED"):
        peer_rows.open_rows(handle, 3, 4, device)


def test_nvml_tells_how_gpus_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    access = {(1, 2, READ): 0, (1, 2, NVLINK): 0, (1, 3, READ): 0, (2, 3, NVLINK): 0}
    use_nvml(monkeypatch, FakeNvml(lambda: None, access))
    found = [link_between(f"GPU-{one}", f"GPU-{other}") for one, other in ((1, 2), (1, 3), (2, 3))]
    assert found == ["nvlink", "pcie", ""]
    with pytest.raises(RuntimeError, match="nvmlDeviceGetHandleByUUID of NVML failed: Not Supported"):
        link_between("GPU-1", "MIG-4")
    use_nvml(monkeypatch, None)
    with pytest.raises(RuntimeError, match="NVML cannot be loaded: libnvidia-ml.so.1"):
        link_between("GPU-1", "GPU-2")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_a_name_that_nvml_knows() -> None:
    assert device_name(torch.device("cuda", 0)).startswith("GPU-")
