"""Nodes of a plan that differ only in what belongs to each (rank, ports, address), told once for all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from launcher.plan.build import NodePlan

Rows = Sequence[tuple[str, str]]

_WORD = re.compile(r"([\w.-]+)")

_NUMBER = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class Fold:
    """Nodes whose rows become equal once each one's own values are put in for ``{node_rank}``, ``{address}``, …"""

    nodes: tuple[NodePlan, ...]
    rows: Rows


@dataclass(frozen=True)
class _Taken:
    """One node's rows, cut into what may differ between equal nodes (odd places) and the rest (even places)."""

    node: NodePlan
    names: tuple[str, ...]
    pieces: tuple[tuple[str, ...], ...]


def fold_nodes(listed: Sequence[tuple[NodePlan, Rows]]) -> list[Fold]:
    """Groups in order of their first node. What a Fold says holds for each of its nodes to the letter."""
    addresses = {node.address for node, _ in listed}
    alike: dict[object, list[_Taken]] = {}
    for node, rows in listed:
        pieces = tuple(tuple(_pieces(text, addresses)) for _, text in rows)
        one = _Taken(node, tuple(name for name, _ in rows), pieces)
        alike.setdefault((one.names, tuple(cut[::2] for cut in pieces)), []).append(one)
    folds = [fold for group in alike.values() for fold in _folds(group)]
    return sorted(folds, key=lambda fold: fold.nodes[0].node_rank)


def own_values(node: NodePlan) -> Mapping[str, str]:
    """What a node has of its own, by the name a Fold shows for it; for equal values the first name is shown."""
    return {
        "{node_rank}": str(node.node_rank),
        "{service_port}": str(node.service_port),
        **_ends("rank", node.ranks),
        **_ends("part", node.parts),
        "{address}": node.address,
        **_inner("rank", node.ranks),
        **_inner("part", node.parts),
        **({} if node.trainer_index is None else {"{trainer_index}": str(node.trainer_index)}),
    }


def _ends(name: str, numbers: Sequence[int]) -> Mapping[str, str]:
    return {f"{{first_{name}}}": str(numbers[0]), f"{{last_{name}}}": str(numbers[-1])} if numbers else {}


def _inner(name: str, numbers: Sequence[int]) -> Mapping[str, str]:
    return {f"{{first_{name}+{i}}}": str(number) for i, number in enumerate(numbers) if i}


def _pieces(text: str, addresses: Set[str]) -> Iterator[str]:
    """Plain text and, at odd places, addresses of nodes and numbers."""
    plain = ""
    for place, word in enumerate(_WORD.split(text)):
        if place % 2 and word in addresses:
            yield plain
            yield word
            plain = ""
            continue
        first, *more = _NUMBER.split(word)
        plain += first
        for number, after in zip(more[::2], more[1::2], strict=True):
            yield plain
            yield number
            plain = after
    yield plain


def _folds(group: list[_Taken]) -> Iterator[Fold]:
    """One fold of the whole group, or of its parts where something differs that no name stands for."""
    own = [own_values(one.node) for one in group]
    names = {name: [values.get(name) for values in own] for name in own[0]}
    rows = []
    for r, title in enumerate(group[0].names):
        shown = list(group[0].pieces[r])
        for place in range(1, len(shown), 2):
            values = [one.pieces[r][place] for one in group]
            if any(value != values[0] for value in values):
                name = next((name for name, owned in names.items() if owned == values), None)
                if name is None:
                    for value in dict.fromkeys(values):
                        yield from _folds([one for one in group if one.pieces[r][place] == value])
                    return
                shown[place] = name
        rows.append((title, "".join(shown)))
    yield Fold(tuple(one.node for one in group), tuple(rows))
