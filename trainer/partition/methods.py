"""The partition methods and what each can be told; light to import, unlike the methods themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.core.errors import PartitionError
from trainer.core.schema import EdgeType, type_name, type_of

METHODS = ("metis", "random", "hash", "frequency")

#: What parts have about equal numbers of, besides nodes as a whole: nothing more, nodes of each type,
#: train seeds of each type, or both.
BALANCES = ("nodes", "types", "seeds", "types+seeds")

Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]  #: per hop, seeds outward; for all edge types, or for each

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "metis": {"balance": "types+seeds"},
    "random": {},
    "hash": {},
    "frequency": {"balance": "types+seeds", "fanouts": (15, 10, 5)},
}


def method_options(method: str, **given: Any) -> dict[str, Any]:
    """Everything ``method`` is told, defaults included, as JSON values: part of a partition's fingerprint.

    None stands for not given, and what a method has no use for is left out. Raises ``PartitionError`` for an
    unknown method, option or value.
    """
    if method not in METHODS:
        raise PartitionError(f"unknown partition method {method!r}; there are {', '.join(METHODS)}")
    known = sorted({name for options in _DEFAULTS.values() for name in options})
    for name in given:
        if name not in known:
            raise PartitionError(f"unknown partition option {name!r}; there are {', '.join(known)}")
    options = {name: default if given.get(name) is None else given[name] for name, default in _DEFAULTS[method].items()}
    if "balance" in options and options["balance"] not in BALANCES:
        raise PartitionError(f"unknown balance {options['balance']!r}; there are {', '.join(BALANCES)}")
    if "fanouts" in options:
        options["fanouts"] = _plain_fanouts(options["fanouts"])
    return options


def fanouts_of(plain: Any) -> Fanouts:
    """Fanouts as the samplers take them, from ``method_options``."""
    if not isinstance(plain, Mapping):
        return tuple(plain)
    return {_edge_type(name): tuple(hops) for name, hops in plain.items()}


def _plain_fanouts(fanouts: Any) -> Any:
    if isinstance(fanouts, Mapping):
        named = {of if isinstance(of, str) else type_name(of): hops for of, hops in fanouts.items()}
        return {name: _plain_hops(hops) for name, hops in sorted(named.items())}
    return _plain_hops(fanouts)


def _plain_hops(hops: Any) -> list[int]:
    numbers = list(hops) if isinstance(hops, (list, tuple)) else [hops]
    if not numbers or not all(isinstance(hop, int) and hop >= -1 for hop in numbers):
        raise PartitionError(f"fanouts {hops!r}: expected whole numbers, one per hop, -1 for all neighbours")
    return numbers


def _edge_type(name: str) -> EdgeType:
    of = type_of(name)
    if isinstance(of, str):
        raise PartitionError(f"fanouts: {name!r} is no edge type; write source__relation__target")
    return of
