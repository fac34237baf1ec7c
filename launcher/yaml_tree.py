"""Parses YAML into a tree whose values carry their file and line.

Scalars keep their text as written: ``1e-3`` or ``on`` is converted later, to the type of the config field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import Problem
from launcher.hostlist import MOST, RangeError, expand, is_range


class Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text such as ``1e-3``; without quotes ``load_config`` would read it as a number."""


FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Origin:
    file: str  #: as the user named it, or ``--set key=value``
    line: int  #: counted from 1; 0 for ``--set``
    folder: Path  #: the folder to which relative paths in this file refer


@dataclass(frozen=True)
class Scalar:
    """A value that is neither a list nor a mapping; may be empty."""

    origin: Origin
    text: str
    tag: str  #: type by YAML 1.1: str, int, float, bool, null, …
    plain: bool = True  #: written without quotes

    @property
    def empty(self) -> bool:
        return self.tag == "null" and self.plain


@dataclass(frozen=True)
class YamlSequence:
    origin: Origin
    items: tuple[Tree, ...]


@dataclass(frozen=True)
class Section:
    origin: Origin
    items: Mapping[str, Tree]
    keys: Mapping[str, Origin] = field(default_factory=dict)  #: origin of each key


Tree = Scalar | YamlSequence | Section

#: A change to a config: ``key=value`` of --set, whose value is YAML, or a dotted key and the value itself: the text of
#: another option, a number, None (the key's default), a list or a dict.
Override = str | tuple[str, Any]

Report = Callable[[Problem], None]

MOST_BYTES = 1 << 22  #: maximum size of a file with hosts or settings; 4,096 nodes with all keys take a third of it

_MOST_VALUES = 500_000  # maximum number of keys and values in a file; an alias counts as what it stands for

_SHOWN = 200  # characters of a value in a message

_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL and lone UTF-16 surrogates, which no name or path can contain


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses files with too many values."""

    def __init__(self, text: str):
        super().__init__(text)
        self._values = 0  # so far
        self._sizes: dict[int, int] = {}  # number of values in each node, by its ``id``

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self._values
        node = super().compose_node(parent, index)
        self._values += self._sizes.get(id(node), 1) if isinstance(event, yaml.AliasEvent) else 1
        self._sizes.setdefault(id(node), self._values - before)
        if self._values > _MOST_VALUES:
            words = f"the document expands to more than {_MOST_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=words, problem_mark=event.start_mark)
        return node


def read_tree(text: str, file: str, folder: Path, report: Report, *, line: int | None = None) -> Tree | None:
    """Parse one YAML document; syntax errors and duplicate keys go to ``report``.

    Returns None for an empty or invalid document. ``line``: for text that is not in a file, the line number to record
    for every value; None to record the line of each value in ``text``.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if line is not None and "#" in text[node.end_mark.index if node else 0 :]:  # a value has no room for a comment
            words = "`#` begins a comment in YAML; put the text in quotes within those of the shell, as KEY='\"a #b\"'"
            report(Problem(file, line, words))
        return None if node is None else _Builder(file, folder, report, line).build(node)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        at, words = (loader.line + 1 if loader else 1), str(error)  # OverflowError: an escape beyond Unicode's range
        if isinstance(error, yaml.YAMLError):
            at, words = _explain(error, text)
        elif isinstance(error, RecursionError):
            words = "the document is nested too deeply, or an alias contains itself"
        report(Problem(file, at if line is None else line, f"not valid YAML: {words}"))
        return None
    finally:
        if loader:
            loader.dispose()


def split_override(override: Override) -> tuple[str, str]:
    """Return the key and the value of an override as texts, for messages and records; ("", "x") for ``x`` alone."""
    if isinstance(override, str):
        key, equals, text = override.partition("=")
        return (key.strip(), text) if equals else ("", key)
    key, value = override
    return key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tree_of(value: Any, origin: Origin) -> Tree:
    """Return a value that is not in a file as a tree. Raises ValueError for a text with characters not allowed."""
    if isinstance(value, Mapping):
        items = {key: tree_of(item, origin) for key, item in value.items()}
        return Section(origin, items, dict.fromkeys(items, origin))
    if isinstance(value, (list, tuple)):
        return YamlSequence(origin, tuple(tree_of(item, origin) for item in value))
    if value is None:
        return Scalar(origin, "", "null")
    if found := _NO_TEXT.search(str(value)):
        raise ValueError(f"the character {found[0]!r} is not allowed")
    return Scalar(origin, str(value), "int" if str(value).isdecimal() else "str")


def shortened(text: str) -> str:
    """Return ``text`` as one line, cut to the length that a message shows. Escapes what a terminal would act on."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: _SHOWN + 1])
    return shown if len(text) <= _SHOWN else f"{shown[:_SHOWN]}…"


def describe(tree: Tree) -> str:
    """Describe a value for messages of the form "expected …, found …"."""
    if isinstance(tree, Section):
        return "a section of keys"
    if isinstance(tree, YamlSequence):
        return "a list"
    if tree.empty:
        return "nothing" + (' (a bare ~ is empty in YAML: write "~")' if tree.text == "~" else "")
    shown = shortened(tree.text)
    return f"the text `{shown}`" if tree.tag == "str" else f"`{shown}`"


@dataclass
class _Builder:
    file: str
    folder: Path
    report: Report
    line: int | None
    built: dict[int, Tree] = field(default_factory=dict)  #: by ``id`` of the YAML node, which aliases share

    def origin(self, node: yaml.Node) -> Origin:
        return Origin(self.file, node.start_mark.line + 1 if self.line is None else self.line, self.folder)

    def build(self, node: yaml.Node) -> Tree:
        if id(node) not in self.built:
            self.built[id(node)] = self._build(node)
        return self.built[id(node)]

    def _build(self, node: yaml.Node) -> Tree:
        origin = self.origin(node)
        if isinstance(node, yaml.MappingNode):
            return self.section(node, origin)
        if isinstance(node, yaml.SequenceNode):
            return YamlSequence(origin, tuple(map(self.build, node.value)))
        if found := _NO_TEXT.search(node.value):
            words = f"the character {found[0]!r} is not allowed"
            raise yaml.MarkedYAMLError(problem=words, problem_mark=node.start_mark)
        return Scalar(
            origin, node.value, node.tag.rpartition(":")[2], plain=isinstance(node, yaml.ScalarNode) and not node.style
        )

    def section(self, node: yaml.MappingNode, origin: Origin) -> Section:
        items: dict[str, Tree] = {}
        keys: dict[str, Origin] = {}
        merged: list[Section] = []
        for key, value in node.value:
            at = self.origin(key)
            if key.tag.endswith(":merge"):
                merged += self.merged(self.build(value))
            elif not isinstance(key, yaml.ScalarNode):
                self.report(Problem(at.file, at.line, "a key must be one word, not a list or a section"))
            elif key.value in items:
                first = f"; first on line {keys[key.value].line}" if self.line is None else ""
                self.report(Problem(at.file, at.line, f"key `{key.value}` is given twice{first}"))
            else:
                items[key.value], keys[key.value] = self.build(value), at
        for other in merged:
            items, keys = {**other.items, **items}, {**other.keys, **keys}
        return Section(origin, items, keys)

    def merged(self, tree: Tree) -> Iterator[Section]:
        for part in tree.items if isinstance(tree, YamlSequence) else (tree,):
            if isinstance(part, Section):
                yield part
            else:
                self.report(Problem(part.origin.file, part.origin.line, "the value of `<<` must be a section of keys"))


_CLEAR_WORDS = {
    "'\\t' that cannot start any token": "a tab cannot indent YAML; use spaces",
    "mapping values are not allowed here": "a `:` is not allowed here; check the indentation, or quote the text",
    "could not find expected ':'": "a key without `:`",
    "expected the node content": "a value is missing here",
    "expected <block end>": "the indentation does not fit the lines above",
    "expected ',' or ']'": "a list in [ ] without `,` or the closing `]`",
    "expected ',' or '}'": "a section in { } without `,` or the closing `}`",
    "found unexpected end of stream": "a quote that is never closed",
    "but found another document": "a second document (`---`); one file holds one cluster",
    "found character '@' that cannot start any token": "a text cannot begin with `@`; quote it",
    "found character '`' that cannot start any token": "a text cannot begin with a backquote; quote it",
    "found character '%' that cannot start any token": "a text cannot begin with `%`; quote it",
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
    # As before the bracket of ``node[01-04]``.
    return bool((mark.buffer or "")[mark.pointer - 1 : mark.pointer].strip())


def expand_nodes(tree: Tree) -> Tree:
    """Expand the value of ``nodes``: ``2`` to two entries for localhost, ``node[01-04]`` to four hosts.

    Each node keeps the file and line of its entry. An invalid range is kept as written; the config reader reports
    it. Raises RangeError for more than ``MOST`` nodes.
    """
    too_many = RangeError(f"there may be {MOST:,} nodes at most")
    if isinstance(tree, Scalar) and is_count(tree):
        if len(tree.text) > 9 or int(tree.text) > MOST:
            raise too_many
        return YamlSequence(tree.origin, (Scalar(tree.origin, "localhost", "str"),) * int(tree.text))
    if isinstance(tree, Scalar) and is_range(tree.text):
        tree = YamlSequence(tree.origin, (tree,))
    if not isinstance(tree, YamlSequence):
        return tree
    nodes: list[Tree] = []
    for item in tree.items:
        host = item.items.get("host") if isinstance(item, Section) else item
        hosts: list[Tree] = []
        if isinstance(host, Scalar) and is_range(host.text):
            with suppress(RangeError):
                hosts = [Scalar(host.origin, name, "str") for name in expand(host.text)]
        if isinstance(item, Section):
            hosts = [Section(item.origin, {**item.items, "host": one}, item.keys) for one in hosts]
        nodes += hosts or [item]
        if len(nodes) > MOST:
            raise too_many
    return YamlSequence(tree.origin, tuple(nodes))


def is_count(tree: Tree) -> bool:
    """Whether the tree is a plain number, as in ``nodes: 2``."""
    return isinstance(tree, Scalar) and tree.plain and tree.text.isdecimal()


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "'" if FLOAT.fullmatch(text) else None),
)
