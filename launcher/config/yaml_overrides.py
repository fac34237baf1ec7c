"""``--set train.lr=1e-3``: a value put into the tree before it is read. ``*`` stands for every entry of a list."""

from __future__ import annotations

from collections.abc import Sequence as Words
from pathlib import Path

from launcher.config.yaml_nodes import expand_nodes
from launcher.config.yaml_tree import Origin, Report, Scalar, Section, Sequence, Tree, read_tree
from launcher.errors import Problem


def apply_override(tree: Section, override: str, report: Report) -> Section:
    """``tree`` with one ``dotted.key=value`` put in; the value is YAML, paths in it start from here."""
    name = f"--set {override}"
    key, equals, text = override.partition("=")
    words = key.strip().split(".")
    if not equals or not all(words):
        report(Problem(name, 0, "expected key=value, for instance train.lr=0.01 or nodes.0.procs=2"))
        return tree
    origin = Origin(name, 0, Path.cwd())
    failed: list[Problem] = []
    value = read_tree(text, name, origin.folder, failed.append, line=0) or Scalar(origin, "", "null")
    try:
        changed = tree if failed else _put(tree, words, value, origin)
    except LookupError as error:
        failed.append(Problem(name, 0, str(error.args[0])))
        changed = tree
    for problem in failed:
        report(problem)
    assert isinstance(changed, Section)
    return changed


def _put(tree: Tree, words: Words[str], value: Tree, origin: Origin, path: str = "") -> Tree:
    if not words:
        return value
    word, here = words[0], f"{path}.{words[0]}".lstrip(".")
    tree = _opened(tree, path, word)
    if isinstance(tree, Sequence):
        items = list(tree.items)
        if word == "*":
            return Sequence(tree.origin, tuple(_put(item, words[1:], value, origin, here) for item in items))
        if not word.isdecimal() or int(word) >= len(items):
            raise LookupError(f"{path} has entries 0 to {len(items) - 1}, no `{word}`")
        items[int(word)] = _put(items[int(word)], words[1:], value, origin, here)
        return Sequence(tree.origin, tuple(items))
    if word == "*":
        raise LookupError(f"{path or 'the top level'} is no list, so `*` stands for nothing there")
    if isinstance(tree, Scalar) and not tree.empty:
        raise LookupError(f"{path} is `{tree.text}`, which has no keys")
    items_now = tree.items if isinstance(tree, Section) else {}
    keys_now = tree.keys if isinstance(tree, Section) else {}
    below = items_now.get(word, Scalar(origin, "", "null"))
    items_now = {**items_now, word: _put(below, words[1:], value, origin, here)}
    return Section(tree.origin, items_now, {**keys_now, word: keys_now.get(word, origin)})


def _opened(tree: Tree, path: str, word: str) -> Tree:
    """``nodes: 2``, ``- node[01-04]`` and ``- user@host`` in their long forms, so that a key can be put inside."""
    if path == "nodes" and (word.isdecimal() or word == "*"):
        return expand_nodes(tree)
    if path.startswith("nodes.") and path.count(".") == 1 and isinstance(tree, Scalar) and not tree.empty:
        return Section(tree.origin, {"host": tree}, {"host": tree.origin})
    return tree
