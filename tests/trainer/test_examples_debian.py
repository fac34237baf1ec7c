"""Tests of the examples on the Debian graph: the data derived from it, and the accuracy."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from trainer.partition.make import PartitionSpec, make_partition

REPOSITORY = Path(__file__).resolve().parents[2]
HETERO = {"hetero": True, "target": "package", "undirected": True, "reverse_types": True}
LINKS = HETERO | {"hold_out": "package__depends__package"}


@pytest.fixture(scope="module")
def debian(shared_data: Path) -> Path:
    return shared_data / "debian"


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(REPOSITORY / "examples" / f"{script}.py"), *words]
    folder = tempfile.mkdtemp()  # where they write their output
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figure(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found, output
    return float(found[1])


def made(folder: Path, source: Path, options: dict[str, object]) -> str:
    make_partition(PartitionSpec("file", str(folder), str(source), options), say=lambda line: None)
    return str(folder)


@pytest.fixture(scope="module")
def derived(debian: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("derived")
    run("prepare_debian", str(debian), str(folder))
    return folder


@pytest.mark.slow
def test_derived_edges_are_those_of_the_homogeneous_graph_with_the_strongest_relation(debian: Path, derived: Path):
    own, given = np.load(derived / "edge_index.npy"), np.load(debian / "edge_index.npy")
    weight = np.load(derived / "edge_weight.npy")
    keys = [edges[0].astype(np.int64) * 63666 + edges[1] for edges in (own, given)]
    assert np.array_equal(np.sort(keys[0]), np.sort(keys[1]))
    by_pair = dict(zip(keys[0].tolist(), weight.tolist(), strict=True))
    src, dst = np.load(debian / "hetero" / "package__depends__package.npy").astype(np.int64)
    assert all(by_pair[a * 63666 + b] == by_pair[b * 63666 + a] == 8 for a, b in zip(src, dst, strict=True) if a != b)
    assert set(np.unique(weight)) == {1, 2, 4, 8}


def test_derived_times_put_dependencies_before_their_packages(debian: Path, derived: Path):
    time = np.load(derived / "time.npy")
    needs = [np.load(debian / "hetero" / f"package__{name}__package.npy") for name in ("depends", "pre-depends")]
    src, dst = np.concatenate(needs, axis=1).astype(np.int64)
    assert time.dtype == np.int64 and time.min() == 0
    assert np.mean(time[dst] < time[src]) > 0.95, "all but the packages in cycles come after their dependencies"
    assert np.all(time[np.setdiff1d(np.arange(len(time)), src)] == 0), "packages without dependencies come first"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_section_is_predicted_better_from_all_types(debian: Path, tmp_path: Path):
    words = ["--epochs", "2", "--hidden", "128", "--batch-size", "1024", "--lr", "0.004", "--dropout", "0.3"]
    plain = run("node_classification", "--parts", made(tmp_path / "homo", debian, {}), "--fanouts", "15,10,5", *words)
    typed = run("hetero_classification", "--parts", made(tmp_path / "het", debian, HETERO), "--fanouts", "8,4", *words)
    homo, hetero = (figure(r"test accuracy ([\d.]+)\n$", output) for output in (plain, typed))
    assert hetero > 0.8 and hetero > homo + 0.1


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_dependencies_are_predicted(debian: Path, tmp_path: Path):
    output = run(
        "link_prediction", "--parts", made(tmp_path / "links", debian, LINKS), "--relation", LINKS["hold_out"],
        "--hidden", "128", "--fanouts", "6,3", "--eval-fanouts", "10,5", "--batch-size", "2048", "--epochs", "2",
    )  # fmt: skip
    assert figure(r"test, model: MRR ([\d.]+)", output) > 0.5 > figure(r"test, popularity: MRR ([\d.]+)", output)
    assert figure(r"test, model: .*AUC ([\d.]+)", output) > 0.97


@pytest.mark.slow
def test_weights_and_times_of_the_real_graph(derived: Path, tmp_path: Path):
    parts = made(tmp_path / "parts", derived, {})
    words = ["--parts", parts, "--epochs", "2", "--batch-size", "1024", "--hidden", "128"]
    assert figure(r"\ngain by weights ([-+][\d.]+)\n", run("weighted_sampling", *words)) > -0.02
    output = run("temporal_classification", *words)
    assert "with time_attr: 0 of" in output and figure(r"test accuracy ([\d.]+)\n", output) > 0.4
