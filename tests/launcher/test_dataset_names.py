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
        ("cora", "did you mean `Planetoid:Cora`"),
        ("dblp", "did you mean `DBLP`"),
        ("Planetoid:Corra", "did you mean `Planetoid:Cora`"),
        ("Planetoid", "it has several graphs: Planetoid:Cora, Planetoid:CiteSeer, Planetoid:PubMed"),
        ("Amazon:", "it has several graphs: Amazon:Computers, Amazon:Photo"),
        ("synthetic:100", "did you mean `synthetic`"),
        ("ogbn-arxiv:x", "did you mean `ogbn-arxiv`"),
        ("graph", "there are synthetic, synthetic-hetero, file, tables, partition, ogbn-arxiv"),
        ("x" * 100_000, "there is no dataset `xxx"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(name: str, message: str) -> None:
    assert message in misspelt_dataset(name) and len(misspelt_dataset(name)) < 500


@pytest.mark.parametrize(
    "name",
    [
        *("file", "ogbn-mag", "Planetoid:Cora", "Planetoid:citeseer", "KarateClub", "OfTheFutureGraphs"),
        *("Planetoid:OfTheFuture", "HeterophilousGraphDataset:roman_empire", "Twitch:DE"),
    ],
)
def test_datasets_are_accepted(name: str) -> None:
    assert misspelt_dataset(name) == ""
