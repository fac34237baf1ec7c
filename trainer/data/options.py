"""Dataset options: parses `name=value` text or YAML values into a checked dataclass."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from trainer.core.errors import DataError
from trainer.core.files import parse_json

T = TypeVar("T")

OWN_DATASETS = ("synthetic", "synthetic-hetero", "file", "tables", "partition")


@dataclass(frozen=True)
class SyntheticOptions:
    """Options of dataset `synthetic`: a planted-partition graph with skewed degrees."""

    num_nodes: int = 20_000
    avg_degree: float = 20.0  #: mean number of in-edges per node; each direction of an undirected edge counts
    num_classes: int = 16
    num_features: int = 64
    homophily: float = 0.4  #: probability that an edge's target is drawn from the class of its source
    skew: float = 2.5  #: exponent of the power law of expected degrees; larger means more even degrees
    noise: float = 1.0  #: standard deviation of features around the centre of their class
    seed: int = 0
    train: float = 0.3  #: below 1: share of the nodes; otherwise number of nodes
    val: float = 0.1  #: as ``train``
    test: float = 0.2  #: as ``train``
    edge_weight: bool = False  #: add the edge attribute `edge_weight`, larger within a class
    time: bool = False  #: add node attribute `time` and edge attribute `edge_time`; most edges lead to later nodes
    hold_out: str | None = None  #: edge type whose links are partly moved to val_links and test_links
    hold_out_val: float = 0.05  #: share of the links in val_links
    hold_out_test: float = 0.1  #: share of the links in test_links
    hold_out_time: str | None = None  #: integer edge attribute: the latest links are held out; None: random ones


@dataclass(frozen=True)
class SyntheticHeteroOptions:
    """Options of dataset `synthetic-hetero`: a graph of papers, authors and fields with planted classes."""

    num_nodes: int = 10_000  #: number of papers; half as many authors, a twentieth as many fields
    avg_degree: float = 6.0  #: mean number of papers that a paper cites, and that it disputes
    num_classes: int = 8
    num_features: int = 32
    homophily: float = 0.5  #: probability that an edge's other end is drawn from the class its relation points to
    noise: float = 2.0  #: standard deviation of features around the centre of their class
    all_features: bool = False  #: give authors and fields features `x` as well
    undirected: bool = True  #: add rev_writes, rev_cites, rev_disputes, rev_about
    seed: int = 0
    train: float = 0.3  #: below 1: share of the papers; otherwise number of papers
    val: float = 0.1  #: as ``train``
    test: float = 0.2  #: as ``train``
    edge_weight: bool = False  #: add the edge attribute `edge_weight`, larger where classes match
    time: bool = False  #: add `time` to papers and `edge_time` to edges
    hold_out: str | None = None  #: edge type whose links are partly moved to val_links and test_links
    hold_out_val: float = 0.05  #: share of the links in val_links
    hold_out_test: float = 0.1  #: share of the links in test_links
    hold_out_time: str | None = None  #: integer edge attribute: the latest links are held out; None: random ones


MOST_CLASSES = 1 << 20


@dataclass(frozen=True)
class SourceOptions:
    """Options of datasets that are read from files or downloads."""

    num_nodes: int | None = None  #: number of nodes of a homogeneous graph without x and y
    num_classes: int | None = None  #: number of classes if labels do not use all of them; 0: y is not class labels
    undirected: bool = False  #: add the reverse of every edge, without duplicates
    normalize_features: bool = False  #: divide each row of x by the sum of its absolute values
    split: int | None = None  #: column of the masks, if they have several
    time_attrs: tuple[str, ...] | None = None  #: node attributes that are times; None: `time` if it is one integer
    hetero: bool | None = (
        None  #: read a heterogeneous graph, also from the sub-folder hetero/; None: decide by the names of the arrays
    )
    target: str | None = None  #: node type of x, y and splits whose names have no type
    reverse_types: bool = False  #: with undirected: add rev_<relation> also for relations within one node type
    subset: int | None = None  #: number of nodes to keep, with the edges between them; None: the whole graph
    hold_out: str | None = None  #: edge type whose links are partly moved to val_links and test_links
    hold_out_val: float = 0.05  #: share of the links in val_links
    hold_out_test: float = 0.1  #: share of the links in test_links
    hold_out_time: str | None = None  #: integer edge attribute: the latest links are held out; None: random ones
    hold_out_split: str | None = None  #: edge attribute, 0, 1 for val_links or 2 for test_links: these are held out

    @property
    def times(self) -> tuple[str, ...]:
        """Names of the attributes that contain times: option ``time_attrs`` if given, else `time`."""
        return ("time",) if self.time_attrs is None else self.time_attrs


def parse_options(kind: type[T], options: Mapping[str, Any], dataset: str) -> T:
    """Make a dataclass of type ``kind`` from ``options``. Text is converted to the type of its field.

    Raises ``DataError`` for an unknown name or a value of another type.
    """
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"the options are {', '.join(known)}"
            raise DataError(f"dataset {dataset}: unknown option {name!r}; {hint}")
    found: dict[str, Any] = {}
    for name, value in options.items():
        wanted = known[name].removesuffix(" | None")
        if value is None and wanted != known[name]:
            found[name] = None
            continue
        parse, what = _KINDS[wanted]
        try:
            found[name] = parse(value)
        except (TypeError, ValueError, OverflowError):
            raise DataError(f"dataset {dataset}: option {name} must be {what}, not {value!r}") from None
    return kind(**found)


def _integer(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(value)
    return int(value) if isinstance(value, int) else int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(value)
    return float(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in ("true", "yes", "1", "false", "no", "0"):
        raise ValueError(value)
    return text in ("true", "yes", "1")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    """Parse names given as a list, as ``a,b``, as a JSON list, or as ``none``."""
    if isinstance(value, str):
        if value.strip().lower() == "none":
            return ()
        listed = value.strip().startswith("[")
        value = parse_json(value) if listed else [name.strip() for name in value.split(",") if name.strip()]
    return tuple(_text(name) for name in value)


_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_integer, "a whole number"),
    "float": (_number, "a number"),
    "bool": (_boolean, "true or false"),
    "str": (_text, "a name"),
    "tuple[str, ...]": (_names, "names with commas, a list of names, or none"),
}
