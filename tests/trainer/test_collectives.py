"""Tests of the values that ranks exchange: plain data and tensors, never pickled objects."""

from __future__ import annotations

import ast
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from train_kit import run_forked
from trainer.core.collectives import decode, encode
from trainer.core.errors import PeerError
from trainer.core.ranks import RankGroup, Ranks

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
#: Files that may unpickle, each with its own test: kernels from a private folder, arrays with restricted unpicklers.
UNPICKLE = {"partition/foreign/tensor_files.py", "core/compiled.py", "sources/pyg.py"}

VALUES = {"none": None, "floats": [math.inf, -0.0, 1e300], "ids": (1, (2, "x"), ()), 7: [True, b"raw"]}
TENSORS = {
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    "bits": torch.tensor([True, False]),
}


def names_used(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}


def test_no_module_of_the_trainer_sends_objects_and_few_unpickle() -> None:
    used = {path.relative_to(TRAINER).as_posix(): names_used(path) for path in TRAINER.rglob("*.py")}
    objects = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"}
    assert {path for path, names in used.items() if names & objects} == set()
    assert {path for path, names in used.items() if names & {"pickle", "Unpickler"}} == UNPICKLE


def exchange_values() -> None:
    dist.init_process_group("gloo")
    group = RankGroup.of_process(Ranks.from_env(os.environ))
    gathered = group.gather((group.rank, VALUES, "x" * 1000 * group.rank))
    assert gathered == [(rank, VALUES, "x" * 1000 * rank) for rank in range(2)]
    found = group.from_first({"of": TENSORS, "n": (1, 2)} if group.rank == 0 else None)
    assert found is not None and found["n"] == (1, 2) and found["of"].keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        received = found["of"][name]
        assert received.dtype == tensor.dtype and torch.equal(received, tensor), name
    dist.destroy_process_group()


def test_ranks_exchange_values_and_tensors() -> None:
    for ended in run_forked(exchange_values, (), 2):
        assert ended.returncode == 0, ended.output


def test_numpy_numbers_are_sent_as_python_numbers() -> None:
    found = decode(encode([np.float64(0.5), np.int64(3), np.bool_(True)], []), [])
    assert found == [0.5, 3, True] and [type(value) for value in found] == [float, int, bool]


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"rank": 0}),
        b"",
        b"\xc7\x00\x05",  # a MessagePack extension of an unknown type
        b"\x91" * 100_000,  # nested lists
        encode(torch.empty(2), []).replace(b"float32", b"no_type"),
    ],
)
def test_invalid_data_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="cannot be decoded"):
        decode(data, [])


def test_objects_are_not_sent() -> None:
    with pytest.raises(TypeError, match="Path cannot be sent"):
        encode({"path": Path("/tmp")}, [])
