"""Tests of benchmarks/bench_peers.py: nothing is installed for systems that are left out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the module benchmarks/peers/contest.py with fakes for the functions that make environments and partitions.

    A fake makes nothing, and adds the name of what it would make to ``made``.
    """
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "graphs", raising=False)  # tests/trainer has a module of this name too
    module = importlib.import_module("peers.contest")
    module.made = set()  # type: ignore[attr-defined]

    def note(name: str, returned: object = None) -> object:
        module.made.add(name)
        return returned

    monkeypatch.setattr(module, "_permitted", lambda wrapper: True)
    monkeypatch.setattr(module, "_python", lambda env: note(env.name, None if env is module.broken else Path("python")))
    monkeypatch.setattr(module, "peer_partition", lambda size, parts, method="random": note(f"ours {parts}"))
    monkeypatch.setattr(module, "_made_by", lambda env, folder, *words: note(f"{env.name} parts"))
    monkeypatch.setattr(module, "peer_graph", lambda size: Path("graph"))
    module.broken = None  # type: ignore[attr-defined]
    yield module
    for name in ("peers.contest", "graphs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("sections", "without", "made"),
    [
        (["partition"], (), {"dgl", "glt"}),
        (["partition"], ("DGL", "graphlearn"), set()),
        (["loader"], ("graphlearn", "torch_geometric"), {"dgl", "ours 1"}),
        (["loader", "parts"], ("graphlearn", "torch_geometric", "gnnfleet"), {"dgl", "dgl parts"}),
        (["parts"], ("DGL",), {"glt", "glt parts", "ours 2"}),
    ],
)
def test_nothing_is_prepared_for_systems_left_out(
    contest: ModuleType, sections: list[str], without: tuple[str, ...], made: set[str]
) -> None:
    chosen = contest.contenders(sections, "small", without=without)
    assert contest.made == made
    assert {one.section for one in chosen} <= set(sections)
    assert not [one.system for one in chosen if any(text in one.system for text in without)]


def test_without_peers_no_environment_is_made(contest: ModuleType) -> None:
    assert {one.env for one in contest.contenders(["loader"], "tenfold", peers=False)} == {None}
    assert contest.made == {"ours 1"}


def test_a_peer_that_cannot_be_installed_is_left_out(contest: ModuleType) -> None:
    contest.broken = contest.DGL
    assert {one.env for one in contest.contenders(["partition"], "small")} == {None, contest.GLT}
