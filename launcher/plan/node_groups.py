"""Groups nodes whose lines in the printed plan differ only in values such as rank and address."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.model import NodePlan

LabelledLines = Sequence[tuple[str, str]]  #: lines about one node, as (label, text)

_Split = tuple[NodePlan, list[tuple[str, list[str]]]]  # a node and its lines: label, and pieces of the text

_WORD = re.compile(r"([\w.-]+)")

_NUMBER = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class Fold:
    """Similar nodes that are shown together: their lines in the plan differ only in values such as rank and address.

    ``rows``: their lines, with placeholders such as ``{node_rank}`` for these values (see ``own_values``).
    """

    nodes: tuple[NodePlan, ...]
    rows: LabelledLines


def fold_nodes(listed: Sequence[tuple[NodePlan, LabelledLines]]) -> list[Fold]:
    """Group nodes whose lines in the plan differ only in their ``own_values``, in order of their first node.

    ``listed``: each node with its lines. If the ``own_values`` of a node are inserted into its Fold, the result is
    exactly the lines of the node.
    """
    # Nodes have most words in common: each is split once, at its numbers, or is an address of a node.
    words = {node.address: ["", node.address, ""] for node, _ in listed}

    def pieces(text: str) -> list[str]:
        """Split ``text`` into plain text (even indices), and numbers or addresses of nodes (odd indices)."""
        found = [""]
        for word in _WORD.split(text):
            cut = words.get(word)
            if cut is None:
                cut = words[word] = _NUMBER.split(word)
            found[-1] += cut[0]
            found += cut[1:]
        return found

    alike: dict[object, list[_Split]] = {}
    for node, rows in listed:
        one = node, [(name, pieces(text)) for name, text in rows]
        alike.setdefault(tuple((name, *cut[::2]) for name, cut in one[1]), []).append(one)
    folds = [fold for group in alike.values() for fold in _folds(group)]
    return sorted(folds, key=lambda fold: fold.nodes[0].node_rank)


def own_values(node: NodePlan) -> Mapping[str, str]:
    """Return the values that may differ between nodes of one ``Fold``, by placeholder such as ``{node_rank}``.

    For equal values, the plan shows the placeholder that comes first in the result.
    """
    numbered = {"rank": node.ranks, "part": node.parts}
    ends = ({f"{{first_{name}}}": own[0], f"{{last_{name}}}": own[-1]} for name, own in numbered.items() if own)
    inner = ({f"{{first_{name}+{i}}}": number for i, number in enumerate(own) if i} for name, own in numbered.items())
    values: dict[str, object] = {"{node_rank}": node.node_rank, "{service_port}": node.service_port}
    for more in ends:
        values |= more
    values["{address}"] = node.address
    for more in inner:
        values |= more
    if node.trainer:
        values["{trainer_index}"] = node.trainer.env["GROUP_RANK"]
    return {name: str(value) for name, value in values.items()}


def _folds(group: Sequence[_Split]) -> Iterator[Fold]:
    """Yield a Fold of nodes whose lines have equal text; several if other values than ``own_values`` differ."""
    own = [own_values(node) for node, _ in group]
    names = {name: [values.get(name) for values in own] for name in own[0]}
    rows = []
    for r, (title, first) in enumerate(group[0][1]):
        shown = list(first)
        for i in range(1, len(shown), 2):
            values = [split[r][1][i] for _, split in group]
            if any(value != values[0] for value in values):
                name = next((name for name, owned in names.items() if owned == values), None)
                if name is None:
                    for value in dict.fromkeys(values):
                        yield from _folds([one for one in group if one[1][r][1][i] == value])
                    return
                shown[i] = name
        rows.append((title, "".join(shown)))
    yield Fold(tuple(node for node, _ in group), tuple(rows))
