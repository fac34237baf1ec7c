"""Tests that a misspelt dataset is refused with the config, and that its names are those of the trainer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.config.dataset_names import OWN, TORCH_GEOMETRIC, misspelt


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flie", "did you mean `file`"),
        ("tabels", "did you mean `tables`"),
        ("File", "did you mean `file`"),
        ("ogbn-prodcuts", "did you mean `ogbn-products`"),
        ("planetoid:Cora", "did you mean `Planetoid:Cora`"),
        ("Planetiod:Cora", "did you mean `Planetoid:Cora`"),
        ("graph", "there are synthetic, synthetic-hetero, file, tables, partition, ogbn-arxiv"),
        ("x" * 100_000, "there is no dataset `xxx"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(name: str, message: str) -> None:
    assert message in misspelt(name) and len(misspelt(name)) < 500


@pytest.mark.parametrize("name", ["file", "ogbn-mag", "Planetoid:Cora", "KarateClub", "OfTheFutureGraphs"])
def test_datasets_are_accepted(name: str) -> None:
    assert misspelt(name) == ""


def test_the_names_are_those_of_the_trainer_and_of_torch_geometric() -> None:
    # in a process of its own, as the launcher's tests import no torch
    program = "import trainer.data.options as o, torch_geometric.datasets as d; print(*o.OWN_DATASETS, '|', *d.__all__)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    own, classes = (part.split() for part in found.split("|"))
    assert tuple(own) == OWN and {name for name in classes if name[0].isupper()} <= set(TORCH_GEOMETRIC)
