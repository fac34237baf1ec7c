"""Tests that a misspelt dataset is refused with the config."""

from __future__ import annotations

import pytest

from launcher.config.consistency import misspelt_dataset


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
    assert message in misspelt_dataset(name) and len(misspelt_dataset(name)) < 500


@pytest.mark.parametrize("name", ["file", "ogbn-mag", "Planetoid:Cora", "KarateClub", "OfTheFutureGraphs"])
def test_datasets_are_accepted(name: str) -> None:
    assert misspelt_dataset(name) == ""
