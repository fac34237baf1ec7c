"""Compiles the CUDA kernels of sampling and layers: needs NVVM (extra ``cuda12`` or ``cuda13``), but no GPU.

numba's simulator runs kernels in Python, so it does not find two kinds of mistakes: code that a device cannot run, and
expressions that mix signed and unsigned integers, which compiled kernels compute in float64.
"""

from __future__ import annotations

import importlib
import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.cuda import array_ops, gather_kernels, kernel_cache, neighbor_kernels, relabel
from trainer.cuda.kernel_cache import variant
from trainer.cuda.launch import Kernel, Mapped, simulated
from trainer.nn.kernels import cuda_elements, cuda_sums

cuda: Any = importlib.import_module("numba.cuda")
types: Any = importlib.import_module("numba.cuda.types")
CAPABILITY = (8, 0)


def has_compiler() -> bool:
    load = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib
    try:
        for library in ("nvvm", "nvrtc", "nvJitLink"):
            load(library)
    except RuntimeError:  # DynamicLibNotFoundError
        return False
    return not simulated()


def signatures() -> list[tuple[Kernel, tuple[Any, ...], bool]]:
    """Return each kernel, the types of its arguments, and whether it computes with float64."""
    t = types
    int32s, int64s, float64s, rows = t.int32[::1], t.int64[::1], t.float64[::1], t.float32[:, ::1]
    number, flag, key = t.int64, t.boolean, t.uint64
    found = [
        (neighbor_kernels.count_picks,
         (int64s, int64s, number, flag, flag, int64s, int64s, int32s, int64s), False),
        (relabel.mark_new, (int64s, number, int64s, int32s), False),
        (relabel.number, (int64s, int64s, number, int64s), False),
        (relabel.look_up, (int64s, int64s, int32s), False),
        (array_ops.copy_rows, (int64s, int32s, int32s, int32s), False),
        (gather_kernels.locate_rows, (int64s, int32s, int64s, int64s, int64s), False),
    ]  # fmt: skip
    plain = (t.float32, t.float64, t.float16, t.int8, t.uint8, t.int64, t.boolean)
    gathering = [(gather_kernels.take_rows, stored) for stored in plain]
    gathering += [(gather_kernels.take_bfloat16_rows, t.uint16), (gather_kernels.take_scaled_rows, t.int8)]
    for take, stored in gathering:
        host = stored[:, ::1]
        found.append((take, (int64s, host, rows, rows, rows), stored == t.float64))
    for ids in (int32s, int64s):
        found += [
            (neighbor_kernels.draw_picks,
             (int64s, int64s, ids, int64s, number, number, flag, key, int32s, int64s, int64s, int64s, int64s, int64s),
             False),
            (neighbor_kernels.draw_conditional,
             (int64s, int64s, ids, int64s, number, number, flag, flag, flag, flag, key, int64s, int64s, int32s, int64s,
              int64s, int64s, int64s, float64s, int64s, int64s), True),
            (relabel.insert, (ids, number, int64s, int64s, int64s), False),
            (gather_kernels.take_numbers, (ids, int64s, int64s), False),
        ]  # fmt: skip
        for weights in (t.float32[::1], float64s):
            found.append((
                neighbor_kernels.collect,
                (int64s, ids, int64s, number, number, flag, flag, flag, int64s, int64s, int64s, int64s, int64s, weights,
                 t.uint8[::1], int64s, int64s, int64s, float64s, int64s, int32s), True,
            ))  # fmt: skip
    return found


def layer_signatures() -> list[tuple[Kernel, tuple[Any, ...], bool]]:
    """As ``signatures``, for the kernels of layers with rows of float32, float64 and bfloat16 (as uint16 bits)."""
    t, found = types, []
    number, ids, places = t.int64, t.int64[::1], t.int32[::1]
    for dtype, stored, total in (
        (torch.float32, t.float32, t.float32), (torch.bfloat16, t.uint16, t.float32),
        (torch.float64, t.float64, t.float64),
    ):  # fmt: skip
        rows, heads, sums, scale = stored[:, ::1], stored[:, :, ::1], total[:, ::1], total[::1]
        two, bits, wide = (number, number), dtype == torch.bfloat16, total == t.float64
        draw = (t.uint64, t.uint32, total, total)
        found += [
            (cuda_elements._mask_rows(dtype), (*two, rows, ids, rows, *draw), wide),
            (cuda_elements._activate(dtype), (*two, rows, scale, ids, *draw), wide),
            (cuda_elements._pass_where_positive(dtype), (*two, rows, rows, rows, total, total), wide),
            (cuda_sums._edge_dots[bits, bits], (*two, *two, places, places, heads, heads, sums, total), wide),
            (cuda_sums._mean_and_self(dtype), (*two, places, places, rows, rows, total, total), wide),
            (cuda_sums._sources(dtype), (*two, number, places, places, scale, rows, rows, total), wide),
        ]  # fmt: skip
        for more in (False, True):
            for kernel in (cuda_sums._sum_rows[bits, more, False], cuda_sums._sum_rows[bits, more, True]):
                found.append((kernel, (*two, places, places, rows, scale, scale, sums, total), wide))
            weighted = cuda_sums._weighted_rows[False, bits, more]
            found.append((weighted, (*two, number, places, places, places, sums, heads, heads_of(total), total), wide))
        if not bits:
            found.append((cuda_sums._softmax, (*two, places, rows, rows, total, total), wide))
            found.append((cuda_sums._softmax_gradient, (*two, places, rows, rows, rows, total), wide))
    return [*found, (cuda_sums._edge_targets, (*two, places, ids, places, places), False)]


def heads_of(dtype: Any) -> Any:
    return dtype[:, :, ::1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numba-cuda compile for a device that is not there."""
    dispatcher, devices, codegen = (
        importlib.import_module(f"numba.cuda.{name}") for name in ("dispatcher", "cudadrv.devices", "codegen")
    )
    here = SimpleNamespace(compute_capability=CAPABILITY)
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: here)
    monkeypatch.setattr(devices, "get_context", lambda *_: SimpleNamespace(device=here))
    monkeypatch.setattr(codegen.JITCUDACodegen, "magic_tuple", lambda self: ((13, 0), CAPABILITY))
    monkeypatch.setattr(dispatcher._Kernel, "bind", lambda self: self._codelibrary.get_cubin(CAPABILITY))


@pytest.mark.usefixtures("device")
@pytest.mark.skipif(not has_compiler(), reason="no NVVM: pip install 'numba-cuda[cu12]'")
def test_a_compiled_kernel_is_loaded_by_later_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "usable_folder", lambda: tmp_path)
    chosen = [each for each in layer_signatures() if each[0] in cuda_sums._sum_rows.values()][:3]
    for kernel, arguments, _ in chosen:
        cubins = []
        for loaded in (0, 1):
            dispatcher = Kernel(kernel.function)._compiled  # as in a new process
            compiled = dispatcher.compile(arguments)
            assert sum(dispatcher.stats.cache_hits.values()) == loaded
            cubins.append(bytes(compiled._codelibrary.get_cubin(CAPABILITY).code))
        assert cubins[0] == cubins[1]
    files = [*tmp_path.glob("cuda.*sum_rows-*.nbc")]
    assert len(files) == len(chosen)
    for file in files:  # as if an incompatible version of a package had written them
        file.write_bytes(pickle.dumps({"unknown": 1}))
    dispatcher = Kernel(chosen[0][0].function)._compiled
    assert dispatcher.compile(chosen[0][1]) and not dispatcher.stats.cache_hits


@pytest.mark.usefixtures("device")
@pytest.mark.skipif(not has_compiler(), reason="no NVVM: pip install 'numba-cuda[cu12]'")
def test_a_launch_compiles_for_the_types_of_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, driver = (importlib.import_module(f"numba.cuda.{name}") for name in ("dispatcher", "cudadrv.driver"))
    launched: list[Any] = []
    monkeypatch.setattr(kernel_cache, "usable_folder", lambda: tmp_path)
    monkeypatch.setattr(dispatcher._Kernel, "launch", lambda self, *_: launched.append(self.signature.args))
    monkeypatch.setattr(driver, "_to_core_stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    take_rows, sources = Kernel(gather_kernels.take_rows.function), torch.zeros(3, dtype=torch.int64)
    table, none, out = torch.zeros(5, 4, dtype=torch.float16), torch.zeros(0, 1), torch.zeros(3, 4)
    take_rows(12, sources, Mapped(table), none, none, out)
    take_rows(12, sources, torch.zeros(5, 4, 8)[:, :, 0], none, none, out)
    rows = types.float32[:, ::1]
    assert launched == [
        (types.int64[::1], types.float16[:, ::1], rows, rows, rows),
        (types.int64[::1], types.float32[:, :], rows, rows, rows),
    ]


def test_variants_of_a_kernel_are_kept_apart() -> None:
    gathering = (gather_kernels.take_rows, gather_kernels.take_scaled_rows, gather_kernels.take_bfloat16_rows)
    assert len({variant(kernel.function) for kernel in gathering}) == len(gathering)
    for kernels in (cuda_sums._sum_rows, cuda_sums._weighted_rows, cuda_sums._edge_dots):
        assert len({variant(kernel.function) for kernel in kernels.values()}) == len(kernels)
    plain, bits = (cuda_elements._mask_rows(dtype) for dtype in (torch.float32, torch.bfloat16))
    assert variant(plain.function) != variant(bits.function) and variant(array_ops.copy_rows.function) == ()


@pytest.mark.usefixtures("device")
@pytest.mark.skipif(not has_compiler(), reason="no NVVM: pip install 'numba-cuda[cu12]'")
def test_kernels_compile_for_a_device() -> None:
    for kernel, arguments, with_float64 in [*signatures(), *layer_signatures()]:
        text, _ = cuda.compile_ptx(kernel.function, arguments, cc=CAPABILITY)
        name = kernel.function.__name__
        assert ".entry" in text and "call.uni" not in text, f"{name} calls functions of the runtime"
        assert with_float64 or not re.search(r"\.f64\b", text), f"{name} computes with float64"
        if with_float64 and name == "collect":
            assert "fma.rn.f64" not in text, name
