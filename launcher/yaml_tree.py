"""Parses YAML into a tree whose values know their file and line.

Texts are kept as written: what ``1e-3`` or ``on`` means is decided by the type that the config wants there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from launcher.errors import Problem
from launcher.hostlist import RangeError, expand, is_range


class Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e-3, which YAML 1.1 leaves bare and ``load_config`` reads as numbers."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, "'" if FLOAT.fullmatch(text) else None)


FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Origin:
    """Where a value was written."""

    file: str  #: as the user named it, or ``--set key=value``
    line: int  #: from 1; 0 for --set
    folder: Path  #: what relative paths written there refer to


@dataclass(frozen=True)
class Scalar:
    """One word, number, text or nothing."""

    origin: Origin
    text: str
    tag: str  #: what YAML 1.1 would make of it: str, int, float, bool, null, …
    plain: bool = True  #: not quoted

    @property
    def empty(self) -> bool:
        return self.tag == "null" and self.plain


@dataclass(frozen=True)
class YamlSequence:
    """A list."""

    origin: Origin
    items: tuple[Tree, ...]


@dataclass(frozen=True)
class Section:
    """A mapping; ``keys`` tells where each key stands."""

    origin: Origin
    items: Mapping[str, Tree]
    keys: Mapping[str, Origin] = field(default_factory=dict)


Tree = Scalar | YamlSequence | Section

Report = Callable[[Problem], None]


def read_tree(text: str, file: str, folder: Path, report: Report, *, line: int | None = None) -> Tree | None:
    """Parse one YAML document; mistakes of syntax and duplicate keys are reported. None: nothing usable.

    ``line`` is given for text that is not in a file, and then stands for every line.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        at, words = _explain(error, text)
        report(Problem(file, at if line is None else line, f"not valid YAML: {words}"))
        return None
    return None if node is None else _Builder(file, folder, report, line).build(node, ())


def describe(tree: Tree) -> str:
    """What was found, in words."""
    if isinstance(tree, Section):
        return "a section of keys"
    if isinstance(tree, YamlSequence):
        return "a list"
    if tree.empty:
        return "nothing" + (' (a bare ~ is empty in YAML: write "~")' if tree.text == "~" else "")
    return f"the text `{tree.text}`" if tree.tag == "str" else f"`{tree.text}`"


@dataclass
class _Builder:
    file: str
    folder: Path
    report: Report
    line: int | None

    def origin(self, node: yaml.Node) -> Origin:
        return Origin(self.file, node.start_mark.line + 1 if self.line is None else self.line, self.folder)

    def build(self, node: yaml.Node, parents: tuple[yaml.Node, ...]) -> Tree:
        origin = self.origin(node)
        if any(node is parent for parent in parents):
            self.report(Problem(origin.file, origin.line, "this alias contains itself"))
            return Scalar(origin, "", "null")
        if isinstance(node, yaml.MappingNode):
            return self.section(node, origin, (*parents, node))
        if isinstance(node, yaml.SequenceNode):
            return YamlSequence(origin, tuple(self.build(item, (*parents, node)) for item in node.value))
        plain = isinstance(node, yaml.ScalarNode) and not node.style
        return Scalar(origin, node.value, node.tag.rpartition(":")[2], plain)

    def section(self, node: yaml.MappingNode, origin: Origin, parents: tuple[yaml.Node, ...]) -> Section:
        items: dict[str, Tree] = {}
        keys: dict[str, Origin] = {}
        merged: list[Section] = []
        for key, value in node.value:
            at = self.origin(key)
            if key.tag.endswith(":merge"):
                merged += self.merged(self.build(value, parents))
            elif not isinstance(key, yaml.ScalarNode):
                self.report(Problem(at.file, at.line, "a key must be one word, not a list or a section"))
            elif key.value in items:
                first = f"; first on line {keys[key.value].line}" if self.line is None else ""
                self.report(Problem(at.file, at.line, f"key `{key.value}` is given twice{first}"))
            else:
                items[key.value], keys[key.value] = self.build(value, parents), at
        for other in merged:
            items, keys = {**other.items, **items}, {**other.keys, **keys}
        return Section(origin, items, keys)

    def merged(self, tree: Tree) -> Iterator[Section]:
        for part in tree.items if isinstance(tree, YamlSequence) else (tree,):
            if isinstance(part, Section):
                yield part
            else:
                self.report(Problem(part.origin.file, part.origin.line, "`<<` takes a section of keys"))


_CLEAR_WORDS = {
    "'\\t' that cannot start any token": "a tab cannot indent YAML; use spaces",
    "mapping values are not allowed here": "a `:` where none can be; check the indentation, or quote the text",
    "could not find expected ':'": "a key without `:`",
    "expected the node content": "a value is missing here",
    "expected <block end>": "the indentation does not fit the lines above",
    "expected ',' or ']'": "a list in [ ] without `,` or the closing `]`",
    "expected ',' or '}'": "a section in { } without `,` or the closing `}`",
    "found unexpected end of stream": "a quote that is never closed",
    "but found another document": "a second document (`---`); one file holds one cluster",
    "expected alphabetic or numeric character": "a `*` or `&` must be followed by a name; quote the text",
}


def _explain(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1, f"the character {chr(error.character)!r} is not allowed"
    if not isinstance(error, yaml.MarkedYAMLError):
        return 1, str(error)
    problem = error.problem or str(error)
    words = next((clear for known, clear in _CLEAR_WORDS.items() if known in problem), problem)
    start = error.context_mark
    mark = start if "never closed" in words and start else error.problem_mark or start
    if mark and re.match(r"expected ',' or '[\]}]', but got '\['", problem) and _touches_a_word(mark):
        words = 'a host range inside [ ] or { } must be quoted, as ["node[01-04]"], or stand on a line of its own'
    since = f" (begun on line {start.line + 1})" if start and mark and start.line < mark.line else ""
    return (mark.line + 1 if mark else 1), words + since


def _touches_a_word(mark: yaml.Mark) -> bool:
    """Whether what is marked follows without a space, as the bracket of node[01-04] does."""
    return bool((mark.buffer or "")[mark.pointer - 1 : mark.pointer].strip())


def expand_nodes(tree: Tree) -> Tree:
    """``nodes: 2`` as two times localhost, ``node[01-04]`` as four hosts; each keeps its place in the file.

    A range that stands for nothing is left as it is, for the reader to report.
    """
    if isinstance(tree, Scalar) and is_count(tree):
        return YamlSequence(tree.origin, (Scalar(tree.origin, "localhost", "str"),) * int(tree.text))
    if isinstance(tree, Scalar) and is_range(tree.text):
        tree = YamlSequence(tree.origin, (tree,))
    if not isinstance(tree, YamlSequence):
        return tree
    return YamlSequence(tree.origin, tuple(node for item in tree.items for node in _expanded(item)))


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


Dumper.add_representer(str, _represent_text)
