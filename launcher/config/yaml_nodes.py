"""``nodes:`` in its long form: one entry for each node, however short it was written."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.yaml_tree import Scalar, Section, Sequence, Tree
from launcher.hostlist import RangeError, expand, is_range


def expand_nodes(tree: Tree) -> Tree:
    """``nodes: 2`` as two times localhost, ``node[01-04]`` as four hosts; each keeps its place in the file.

    A range that stands for nothing is left as it is, for the reader to report.
    """
    if isinstance(tree, Scalar) and is_count(tree):
        return Sequence(tree.origin, (Scalar(tree.origin, "localhost", "str"),) * int(tree.text))
    if isinstance(tree, Scalar) and is_range(tree.text):
        tree = Sequence(tree.origin, (tree,))
    if not isinstance(tree, Sequence):
        return tree
    return Sequence(tree.origin, tuple(node for item in tree.items for node in _expanded(item)))


def is_count(tree: Tree) -> bool:
    """``nodes: 2``."""
    return isinstance(tree, Scalar) and tree.plain and tree.text.isdecimal()


def _expanded(item: Tree) -> Iterator[Tree]:
    host = item.items.get("host") if isinstance(item, Section) else item
    hosts = [Scalar(host.origin, name, "str") for name in _names(host)] if isinstance(host, Scalar) else []
    for one in hosts:
        yield Section(item.origin, {**item.items, "host": one}, item.keys) if isinstance(item, Section) else one
    if not hosts:
        yield item


def _names(host: Scalar) -> list[str]:
    """The hosts of a range; none where it is no range, or a wrong one."""
    try:
        return expand(host.text) if is_range(host.text) else []
    except RangeError:
        return []
