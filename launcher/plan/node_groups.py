"""Groups nodes whose lines in the printed plan differ only in values such as rank and address."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from launcher.plan.model import NodePlan

LabelledLines = Sequence[tuple[str, str]]  #: lines about one node, as (label, text)

_WORD = re.compile(r"([\w.-]+)")

_NUMBER = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class Fold:
    """Similar nodes that are shown together: their lines in the plan differ only in values such as rank and address.

    ``rows``: their lines, with placeholders such as ``{node_rank}`` for these values (see ``own_values``).
    """

    nodes: tuple[NodePlan, ...]
    rows: LabelledLines


@dataclass(frozen=True)
class _SplitRows:
    """The lines of one node, each split into text (even indices) and numbers or addresses (odd indices)."""

    node: NodePlan
    names: tuple[str, ...]
    pieces: tuple[tuple[str, ...], ...]


def fold_nodes(listed: Sequence[tuple[NodePlan, LabelledLines]]) -> list[Fold]:
    """Group nodes whose lines in the plan differ only in their ``own_values``, in order of their first node.

    ``listed``: each node with its lines. If the ``own_values`` of a node are inserted into its Fold, the result is
    exactly the lines of the node.
    """
    split = _Splitter({node.address for node, _ in listed})
    alike: dict[object, list[_SplitRows]] = {}
    for node, rows in listed:
        pieces = tuple(split.pieces(text) for _, text in rows)
        one = _SplitRows(node, tuple(name for name, _ in rows), pieces)
        alike.setdefault((one.names, tuple(cut[::2] for cut in pieces)), []).append(one)
    folds = [fold for group in alike.values() for fold in _folds(group)]
    return sorted(folds, key=lambda fold: fold.nodes[0].node_rank)


def own_values(node: NodePlan) -> Mapping[str, str]:
    """Return the values that may differ between nodes of one ``Fold``, by placeholder such as ``{node_rank}``.

    For equal values, the plan shows the placeholder that comes first in the result.
    """
    return {
        "{node_rank}": str(node.node_rank),
        "{service_port}": str(node.service_port),
        **_ends("rank", node.ranks),
        **_ends("part", node.parts),
        "{address}": node.address,
        **_inner("rank", node.ranks),
        **_inner("part", node.parts),
        **({"{trainer_index}": str(node.trainer.env["GROUP_RANK"])} if node.trainer else {}),
    }


def _ends(name: str, numbers: Sequence[int]) -> Mapping[str, str]:
    return {f"{{first_{name}}}": str(numbers[0]), f"{{last_{name}}}": str(numbers[-1])} if numbers else {}


def _inner(name: str, numbers: Sequence[int]) -> Mapping[str, str]:
    return {f"{{first_{name}+{i}}}": str(number) for i, number in enumerate(numbers) if i}


class _Splitter:
    """Splits texts at numbers and at ``addresses`` of nodes. Nodes have most words in common: each is split once."""

    def __init__(self, addresses: Set[str]):
        self._words = {address: ["", address, ""] for address in addresses}

    def pieces(self, text: str) -> tuple[str, ...]:
        """Return the pieces of ``text``: plain text (even indices), and numbers or addresses of nodes (odd indices)."""
        pieces, words = [""], self._words
        for word in _WORD.split(text):
            cut = words.get(word)
            if cut is None:
                cut = words[word] = _NUMBER.split(word)
            pieces[-1] += cut[0]
            pieces += cut[1:]
        return tuple(pieces)


def _folds(group: list[_SplitRows]) -> Iterator[Fold]:
    """Yield a Fold of nodes whose lines have equal text; several if other values than ``own_values`` differ."""
    own = [own_values(one.node) for one in group]
    names = {name: [values.get(name) for values in own] for name in own[0]}
    rows = []
    for r, title in enumerate(group[0].names):
        shown = list(group[0].pieces[r])
        for i in range(1, len(shown), 2):
            values = [one.pieces[r][i] for one in group]
            if any(value != values[0] for value in values):
                name = next((name for name, owned in names.items() if owned == values), None)
                if name is None:
                    for value in dict.fromkeys(values):
                        yield from _folds([one for one in group if one.pieces[r][i] == value])
                    return
                shown[i] = name
        rows.append((title, "".join(shown)))
    yield Fold(tuple(one.node for one in group), tuple(rows))
