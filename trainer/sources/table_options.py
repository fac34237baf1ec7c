"""Options of dataset `tables`: which columns of which files are nodes and edges."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from trainer.core.errors import DataError
from trainer.core.files import parse_json
from trainer.core.schema import HOMO_EDGE, EdgeType, NodeType, check_word, type_name
from trainer.data.options import SourceOptions, parse_options

Dangling: TypeAlias = Literal["error", "drop"]

SPLITS = ("train", "val", "test")

EDGE_SPLIT = "edge_split"  #: edge attribute, int8: the position in ``SPLITS``; with labels, -1: none

_ROLES = (
    *("id", "source", "target", "relation", "label", "split", "weight", "time"),
    *("features", "one_hot", "categories", "attributes"),
)

KEY_ROLES = ("id", "source", "target", "split")

CATEGORY_ROLES = ("relation", "one_hot", "categories")

_FORMAT = ("delimiter", "encoding", "null_values")  #: keys of a table that can be given for all tables

LARGEST = 3.4028234663852886e38  #: of float32

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """Options that node and edge tables have in common. Columns are given by name."""

    files: tuple[str, ...]  #: CSV or Parquet files, folders or globs, relative to the source folder
    time: str | None = None  #: integers, dates or timestamps
    features: tuple[str, ...] = ()  #: columns of numbers or of lists of numbers, side by side in `x` or `edge_attr`
    one_hot: tuple[str, ...] = ()  #: columns of few texts; a 0/1 column per text follows the features
    categories: tuple[str, ...] = ()  #: columns of texts; each becomes an attribute with codes from 0
    attributes: tuple[str, ...] = ()  #: columns of numbers or of lists; each becomes an attribute of its name
    standardize: bool = False  #: shift and scale each feature that is not a list to mean 0 and standard deviation 1
    fill: float | None = None  #: number in place of missing values and NaN in features; None: they are errors
    delimiter: str | None = None  #: of CSV files; None: detected
    encoding: str | None = None  #: of CSV files, a name that Python knows; None: UTF-8
    null_values: tuple[str, ...] = ()  #: texts that mean a missing value, besides the empty one
    columns: tuple[str, ...] = ()  #: names of the columns of CSV files without a line of names

    def used_columns(self) -> set[str]:
        """Return the names of all columns that are read."""
        return self.columns_of(_ROLES)

    def columns_of(self, roles: Iterable[str]) -> set[str]:
        """Return the names of the columns that are given for one of some keys."""
        found: set[str] = set()
        for role in roles:
            given = getattr(self, role, None)
            found |= {given} if isinstance(given, str) else set(given) if isinstance(given, tuple) else set()
        return found


@dataclass(frozen=True)
class NodeTable(Table):
    """The nodes of one type; a row is a node, numbered in the order of the rows.

    Without files, the nodes are the different ids of this type in edge tables, in ascending order.
    """

    id: str = ""  #: column that names the node, unique
    #: integers from 0, texts (classes in alphabetical order), or other numbers; several columns: numbers side by side
    label: tuple[str, ...] = ()
    #: column with train, val, test; or the share of nodes of each; or ``val_time`` and ``test_time``, Unix seconds
    split: str | Mapping[str, float] | None = None


@dataclass(frozen=True)
class TaskTable(NodeTable):
    """Rows to predict, each about an entity, a node of another type, at a time; the same entity may have many.

    A row becomes a node of its own type, without an id, with one edge from its entity and none to it. With ``targets``,
    the label is a list of nodes, and the row has an edge to each of them, which carries no messages.
    """

    entity: NodeType = ""
    targets: NodeType | None = None  #: node type whose ids ``label`` lists
    #: between the ids of a list in a text; None: the label is a column of lists, or rows have one target each
    separator: str | None = None
    dangling: Dangling = "error"  #: rows whose entity is not in the node table


@dataclass(frozen=True)
class EdgeTable(Table):
    """The edges of one type; a row is an edge."""

    source: str = ""  #: column with the id of the source node
    target: str = ""  #: column with the id of the target node
    weight: str | None = None  #: numbers, at least 0
    relation: str | None = None  #: column of texts; each becomes an edge type, instead of the table's name
    label: tuple[str, ...] = ()  #: as of a node table; then edges of val and test remain edges
    split: str | Mapping[str, float] | None = (
        None  #: column with train, val, test; with a label also shares of the edges
    )
    val_files: tuple[str, ...] = ()  #: files of the links for validation, with the columns of ``files``
    test_files: tuple[str, ...] = ()  #: files of the links for test
    dangling: Dangling = "error"  #: edges whose source or target is not in the node table

    @property
    def has_split(self) -> bool:
        return bool(self.split or self.val_files or self.test_files)


@dataclass(frozen=True)
class TablesOptions(SourceOptions):
    """Options of dataset `tables`."""

    nodes: Mapping[NodeType, NodeTable] = field(default_factory=dict)
    edges: Mapping[EdgeType, EdgeTable] = field(default_factory=dict)
    tasks: Mapping[NodeType, TaskTable] = field(default_factory=dict)


def parse_tables_options(options: Mapping[str, Any]) -> TablesOptions:
    """Parse options ``nodes``, ``edges`` and ``tasks``, mappings or JSON texts, and those of ``SourceOptions``.

    ``delimiter``, ``encoding`` and ``null_values`` beside them are those of tables that have none.

    Raises ``DataError`` for unknown names, values of another type, and edge types without a node table.
    """
    rest = {name: value for name, value in options.items() if name not in ("nodes", "edges", "tasks", *_FORMAT)}
    shared = {name: options[name] for name in _FORMAT if options.get(name) is not None}
    for name in ("num_nodes", "split", "hetero"):
        if rest.get(name) is not None:
            raise DataError(f"dataset tables: leave out option {name!r}; its value follows from the tables")
    common = parse_options(SourceOptions, rest, "tables")
    nodes = {
        of: _table(NodeTable, f"nodes.{of}", given, shared)
        for of, given in _mapping("nodes", options.get("nodes")).items()
    }
    for of in nodes:
        check_word(of, "dataset tables, option nodes")
    edges: dict[EdgeType, EdgeTable] = {}
    for name, given in _mapping("edges", options.get("edges")).items():
        words = name.split("__")
        if len(words) == 1 and len(nodes) == 1:  # the relation alone
            words = [*nodes, words[0], *nodes]
        if len(words) != 3:
            raise DataError(
                f"dataset tables, option edges: {name!r} names no edge type; write source__relation__target, with node "
                f"types of option nodes ({', '.join(nodes)})"
            )
        for word in words:
            check_word(word, "dataset tables, option edges")
        for end in (words[0], words[2]):
            if end not in nodes:
                near = difflib.get_close_matches(end, nodes, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"its tables are {', '.join(nodes)}"
                raise DataError(f"dataset tables, option edges: {name!r}: option nodes has no table {end!r}; {hint}")
        edges[words[0], words[1], words[2]] = _table(EdgeTable, f"edges.{name}", given, shared)
    given_tasks = {} if options.get("tasks") is None else _mapping("tasks", options["tasks"])
    tasks = {}
    for of, given in given_tasks.items():
        if isinstance(given, Mapping) and "table" in given and "files" not in given:  # another word for its files
            given = {"files" if name == "table" else name: value for name, value in given.items()}
        tasks[of] = _table(TaskTable, f"tasks.{of}", given, shared)
    for of, table in tasks.items():
        check_word(of, "dataset tables, option tasks")
        if of in nodes:
            raise DataError(f"dataset tables: tasks.{of}: there is a node table of this name; choose another")
        for key, named in (("entity", table.entity), ("targets", table.targets)):
            if named is not None and named not in nodes:
                near = difflib.get_close_matches(named, nodes, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"its tables are {', '.join(nodes)}"
                raise DataError(f"dataset tables: tasks.{of}.{key}: option nodes has no table {named!r}; {hint}")
        if table.targets is not None and len(table.label) != 1:
            raise DataError(f"dataset tables: tasks.{of}: targets needs the key label, the column with their ids")
        if table.separator is not None and table.targets is None:
            raise DataError(f"dataset tables: tasks.{of}: separator needs the key targets, the node type of the list")
    common = _with_given_split(common, edges)
    inherited = {each.name: getattr(common, each.name) for each in fields(common)}
    return TablesOptions(**inherited, nodes=nodes, edges=edges, tasks=tasks)


def _with_given_split(common: SourceOptions, edges: Mapping[EdgeType, EdgeTable]) -> SourceOptions:
    """Let links of tables with a split be held out as given, with their times if all have them.

    Edges with labels are held out only if option ``hold_out`` names them.
    """
    given = {of: table for of, table in edges.items() if table.has_split and (common.hold_out or not table.label)}
    if not given:
        return common
    if common.hold_out_split is not None:
        raise DataError(
            "dataset tables: leave out option hold_out_split; edge tables have the keys split and val_files"
        )
    if common.hold_out is not None:
        given = {of: table for of, table in given.items() if common.hold_out in (type_name(of), type_name(HOMO_EDGE))}
        if not given:
            return common
    timed = all(table.time for table in given.values())
    time = common.hold_out_time or ("edge_time" if timed else None)
    return replace(common, hold_out_split=EDGE_SPLIT, hold_out_time=time)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        with suppress(ValueError):  # reported below
            value = parse_json(value)
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        example = "paper: {files: papers.csv, id: …}" if name == "nodes" else "cites: {files: …, source: …, target: …}"
        what = "is missing" if value is None else "must map types to tables"
        raise DataError(
            f"data.options.{name} {what}: describe the {name[:-1]} tables, as {{{example}}} (docs/data.md), or let "
            "`gnnfleet partition tables FOLDER` draft them"
        )
    return value


def _table(kind: type[T], where: str, given: Any, shared: Mapping[str, Any]) -> T:
    if kind is NodeTable and given in (None, {}):
        return kind(files=())  # type: ignore[call-arg]
    if not isinstance(given, Mapping):
        raise DataError(f"dataset tables: {where} must be a mapping with `files` and columns, not {given!r}")
    known = {each.name: str(each.type) for each in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
            raise DataError(f"dataset tables: {where}: unknown key {name!r}; {hint}")
    needed: tuple[str, ...] = ("files", "source", "target") if kind is EdgeTable else ("files", "id")
    needed = (*needed, "entity") if kind is TaskTable else needed
    for name in needed:
        if not given.get(name):
            hint = "; {} alone makes nodes of the ids in edge tables" if name == "files" and kind is NodeTable else ""
            raise DataError(f"dataset tables: {where}: {name} is required{hint}")
    values = {
        name: (_PARSERS.get(name) or _PARSERS.get(known[name], _column))(f"{where}.{name}", value)
        for name, value in {**shared, **given}.items()
        if value is not None
    }
    if "split" in values and ("val_files" in values or "test_files" in values):
        raise DataError(f"dataset tables: {where}: give either split, a column, or val_files and test_files")
    if isinstance(values.get("split"), dict) and "val_time" in values["split"] and "time" not in values:
        raise DataError(f"dataset tables: {where}.split: val_time and test_time need the key time")
    if kind is EdgeTable and isinstance(values.get("split"), dict) and "label" not in values:
        raise DataError(
            f"dataset tables: {where}: split: shares are for edges with a label; options hold_out, hold_out_val and "
            "hold_out_test hold out shares of links"
        )
    for label in values.get("label", ()):
        for name in (
            "id",
            "source",
            "target",
            "weight",
            "time",
            "split",
            "features",
            "one_hot",
            "categories",
            "attributes",
        ):
            if label == values.get(name) or (isinstance(values.get(name), tuple) and label in values[name]):
                raise DataError(
                    f"dataset tables: {where}: {label!r} is the label and also in {name}, so the model would read what "
                    f"it is to predict; take it out of {name}"
                )
    return kind(**values)


def _column(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"dataset tables: {where} must be the name of a column, not {value!r}")
    return value


def _columns(where: str, value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not listed:
        raise DataError(f"dataset tables: {where} must be a name or a list of names, not {value!r}")
    names = tuple(_column(where, each) for each in listed)
    if len(set(names)) < len(names):
        raise DataError(f"dataset tables: {where} names {next(n for n in names if names.count(n) > 1)!r} twice")
    return names


def _names(where: str, value: Any) -> tuple[str, ...]:
    names = _columns(where, value)
    _columns(where, [name.lower() for name in names])  # the database does not tell a from A
    return names


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"dataset tables: {where} must be a number, not {value!r}")
    if not abs(value) <= LARGEST:
        raise DataError(f"dataset tables: {where} must be finite and fit into float32, not {value!r}")
    return float(value)


def _encoding(where: str, value: Any) -> str:
    try:
        "".encode(value)
    except (LookupError, TypeError, ValueError):
        raise DataError(
            f"dataset tables: {where} must be the name of an encoding, such as latin-1, cp1252 or utf-16, not {value!r}"
        ) from None
    return str(value)


def _null_values(where: str, value: Any) -> tuple[str, ...]:
    listed = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in listed):
        raise DataError(f"dataset tables: {where} must be a text or a list of texts, not {value!r}")
    if any(re.search("[\\0\\ud800-\\udfff]", str(each)) for each in listed):  # which SQL cannot have
        raise DataError(f"dataset tables: {where} must be texts without NUL and halves of characters, not {value!r}")
    return tuple(map(str, listed))


def _split(where: str, value: Any) -> str | dict[str, float]:
    if isinstance(value, str):
        return _column(where, value)
    if isinstance(value, Mapping) and set(value) == {"val_time", "test_time"}:
        times = {name: _moment(f"{where}.{name}", value[name]) for name in ("val_time", "test_time")}
        if times["val_time"] >= times["test_time"]:
            raise DataError(f"dataset tables: {where}: val_time must be before test_time")
        return times
    if not isinstance(value, Mapping) or not value or not set(value) <= set(SPLITS):
        raise DataError(
            f"dataset tables: {where} must be the name of a column, shares such as {{train: 0.8, val: 0.1, "
            f"test: 0.1}}, or times such as {{val_time: 2024-01-01, test_time: 2024-07-01}}, not {value!r}"
        )
    shares = {name: _number(f"{where}.{name}", value[name]) for name in SPLITS if name in value}
    if min(shares.values()) < 0 or sum(shares.values()) > 1 + 1e-9:
        raise DataError(f"dataset tables: {where}: shares must be at least 0 and add up to at most 1")
    return shares


def _moment(where: str, value: Any) -> float:
    """Return a time as the times of tables are: an integer as it is, a date or timestamp as Unix seconds (UTC)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise DataError(
            f"dataset tables: {where} must be a date or timestamp such as 2024-05-17 12:00:00, or an integer, not "
            f"{value!r}"
        ) from None
    return math.floor((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp())


def _any(is_valid: Callable[[Any], bool], what: str) -> Callable[[str, Any], Any]:
    """Return the parser of a value that stays as it is if ``is_valid``."""

    def parse(where: str, value: Any) -> Any:
        if not is_valid(value):
            raise DataError(f"dataset tables: {where} must be {what}, not {value!r}")
        return value

    return parse


#: name or type of a key -> its parser
_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "tuple[str, ...]": _columns,
    "float | None": _number,
    "str | Mapping[str, float] | None": _split,
    "Dangling": _any(lambda value: value in get_args(Dangling), "error or drop"),
    "bool": _any(lambda value: isinstance(value, bool), "true or false"),
    "delimiter": _any(
        lambda value: isinstance(value, str) and len(value) == 1 and value not in '"\r\n',
        'one character, such as ";" or "\\t"',
    ),
    "encoding": _encoding,
    "null_values": _null_values,
    "columns": _names,
}
