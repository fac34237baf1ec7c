"""Dataset options: from `name=value` text or YAML values to a checked dataclass."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from trainer.core.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class SyntheticOptions:
    """A planted-partition graph with skewed degrees."""

    num_nodes: int = 20_000
    avg_degree: float = 20.0  #: in-edges per node; both directions of an undirected edge count
    num_classes: int = 16
    num_features: int = 64
    homophily: float = 0.4  #: chance that an edge is drawn inside its source's class
    skew: float = 2.5  #: exponent of the power law of expected degrees; larger is more even
    noise: float = 1.0  #: standard deviation of features around their class's centre
    seed: int = 0
    train: float = 0.3  #: below 1: fraction of nodes; otherwise number of nodes
    val: float = 0.1
    test: float = 0.2
    edge_weight: bool = False  #: edge attribute `edge_weight`, larger inside a class
    time: bool = False  #: node attribute `time`, edge attribute `edge_time`, edges mostly from earlier to later nodes
    hold_out: str | None = None  #: edge type; a share of its links is no edge, but in val_links and test_links
    hold_out_val: float = 0.05
    hold_out_test: float = 0.1


@dataclass(frozen=True)
class SyntheticHeteroOptions:
    """Papers, authors and fields with planted classes."""

    num_nodes: int = 10_000  #: papers; half as many authors, a twentieth as many fields
    avg_degree: float = 6.0  #: papers that a paper cites, as many that it disputes
    num_classes: int = 8
    num_features: int = 32
    homophily: float = 0.5  #: chance that a relation's end is drawn in the class the relation points to
    noise: float = 2.0  #: standard deviation of features around their class's centre
    all_features: bool = False  #: authors and fields have x too
    undirected: bool = True  #: add rev_writes, rev_cites, rev_disputes, rev_about
    seed: int = 0
    train: float = 0.3  #: below 1: fraction of papers; otherwise number of papers
    val: float = 0.1
    test: float = 0.2
    edge_weight: bool = False
    time: bool = False
    hold_out: str | None = None  #: edge type; a share of its links is no edge, but in val_links and test_links
    hold_out_val: float = 0.05
    hold_out_test: float = 0.1


@dataclass(frozen=True)
class SourceOptions:
    """Options of graphs that are read rather than made."""

    num_nodes: int | None = None  #: of a homogeneous graph, where x and y do not tell
    num_classes: int | None = None  #: where labels do not reach the last class; 0: y is a plain target
    undirected: bool = False  #: add the opposite of every edge, without duplicates
    split: int | None = None  #: column, where masks have several
    time_attrs: tuple[str, ...] | None = None  #: node attributes that are times; None: `time` where it is one integer
    hetero: bool | None = None  #: read typed names, also those in the sub-folder hetero/; None: names tell
    target: str | None = None  #: node type that arrays without a type belong to
    reverse_types: bool = False  #: undirected keeps relations within one node type apart too, as rev_<relation>
    hold_out: str | None = None  #: edge type; a share of its links is no edge, but in val_links and test_links
    hold_out_val: float = 0.05
    hold_out_test: float = 0.1

    @property
    def times(self) -> tuple[str, ...]:
        """Names that are looked for; those of ``time_attrs`` have to be times, `time` by default need not."""
        return ("time",) if self.time_attrs is None else self.time_attrs


def parse_options(kind: type[T], options: Mapping[str, Any], dataset: str) -> T:
    """``options`` as a ``kind`` value; text is read as the field's type.

    Raises ``DataError`` for an unknown name or a value that does not fit.
    """
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(known)}"
            raise DataError(f"dataset {dataset}: unknown option {name!r}; {hint}")
    return kind(**{name: _convert(name, value, known[name], dataset) for name, value in options.items()})


def _convert(name: str, value: Any, annotation: str, dataset: str) -> Any:
    wanted = annotation.removesuffix(" | None")
    if value is None and wanted != annotation:
        return None
    try:
        return _KINDS[wanted][0](value)
    except (TypeError, ValueError, OverflowError):
        kind = _KINDS[wanted][1]
        raise DataError(f"dataset {dataset}: option {name} must be {kind}, not {value!r}") from None


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
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[_lower(value)]


def _lower(value: Any) -> str:
    text = str(value).lower()
    if text not in ("true", "yes", "1", "false", "no", "0"):
        raise ValueError(value)
    return text


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    """Names from a list, from ``a,b``, or from a list as JSON (which a cluster file's list becomes); ``none``."""
    if isinstance(value, str):
        if value.strip().lower() == "none":
            return ()
        listed = value.strip().startswith("[")
        value = json.loads(value) if listed else [name.strip() for name in value.split(",") if name.strip()]
    return tuple(_text(name) for name in value)


_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_integer, "a whole number"),
    "float": (_number, "a number"),
    "bool": (_boolean, "true or false"),
    "str": (_text, "a name"),
    "tuple[str, ...]": (_names, "names with commas, a list of names, or none"),
}
