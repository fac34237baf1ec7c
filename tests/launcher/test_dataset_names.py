"""Tests that a misspelt dataset is refused with the config."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from launcher.config.consistency import GENERATED_OPTIONS, READ_OPTIONS, misspelt_dataset
from launcher.config.loader import load_config
from launcher.errors import ConfigError
from trainer.data.options import SourceOptions, SyntheticHeteroOptions, SyntheticOptions


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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "dataset: synthetic, options: {num_node: 4}",
            "dataset synthetic has no option `num_node`; did you mean `num_nodes`?",
        ),
        (
            "dataset: file, source: x.pt, options: {hold_outs: e}",
            "dataset file has no option `hold_outs`; did you mean `hold_out`",
        ),
        (
            "dataset: 'Planetoid:Cora', options: {skew: 2}",
            "dataset Planetoid:Cora has no option `skew`; the options are num_nodes",
        ),
    ],
)
def test_misspelt_options_are_refused(data: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yml").write_text(f"nodes: [a]\ndata: {{{data}}}\n")
    with pytest.raises(ConfigError, match="c.yml:2: data.options: ") as refused:
        load_config(tmp_path / "c.yml")
    assert message in str(refused.value)


def test_all_options_of_the_trainer_are_known() -> None:
    kinds = {"synthetic": SyntheticOptions, "synthetic-hetero": SyntheticHeteroOptions}
    for name, kind in kinds.items():
        assert {*GENERATED_OPTIONS[name]} == {field.name for field in fields(kind)}
    assert {*READ_OPTIONS} == {field.name for field in fields(SourceOptions)}
