"""Settings of ``python -m trainer train``: a frozen dataclass with one command-line option per field."""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec

from trainer.core.errors import SettingsError
from trainer.core.remote_settings import RemoteAccess
from trainer.core.schema import EdgeType, type_of
from trainer.core.train_config import NEIGHBORS, TrainConfig, problems
from trainer.core.typed import convert
from trainer.sampler.rule_types import PPR, Rule, Walks

F = TypeVar("F", bound=Callable[..., Any])

_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "below": ("less than", operator.lt),
}


@dataclass(frozen=True)
class TrainSettings(TrainConfig):
    """Model, data and optimisation of a run of the bundled trainer: the keys of ``train`` in cluster.yml.

    [cluster.yml](config.md#train) describes each field.

    Raises:
        SettingsError: Lists all invalid values.
    """

    @property
    def silent(self) -> tuple[EdgeType, ...]:
        """Edge types that carry no messages. Raises ``SettingsError`` for a name of another form."""
        found = [(name, type_of(name)) for name in (self.hard_negatives, self.eval_candidates) if name is not None]
        for name, of in found:
            if isinstance(of, str):
                raise SettingsError(f"{name} is not an edge type; write source__relation__target")
        return tuple(of for _, of in found if not isinstance(of, str))

    def __post_init__(self) -> None:
        if self.model == "embedding":  # it has no layers
            object.__setattr__(self, "fanouts", ())
            object.__setattr__(self, "eval_fanouts", None)
        names: Any = self.edge_attr  # also one name
        object.__setattr__(self, "edge_attr", (names,) if isinstance(names, str) else names and tuple(names))
        for name, kind in _keyed_settings().items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _with_keys(name, kind, value))
        if wrong := [*_beyond_limits(self), *map(str, problems(self))]:
            raise SettingsError("\n".join(wrong))

    @property
    def rule(self) -> Rule | None:
        """The rule by which the sampler chooses neighbours; None: neighbours are edges of the graph."""
        if (chosen := self.neighbors) is None or chosen.name not in ("ppr", "walks"):
            return None
        given = {key: getattr(chosen, key) for key in NEIGHBORS[chosen.name].split()}
        given = {key: value for key, value in given.items() if value is not None}
        for key in given.keys() & {"edge_types", "metapath"}:
            given[key] = tuple(type_of(name) for name in given[key])
        return {"ppr": PPR, "walks": Walks}[chosen.name](**given)


@dataclass(frozen=True)
class TrainJob:
    settings: TrainSettings
    parts: Path | None  #: partition folder; None on a client node, which has no parts
    run_dir: Path  #: folder for metrics and checkpoints
    part_ids: tuple[int, ...] | None = None  #: parts opened here; None: all
    cluster: Path | None = None  #: cluster.json; None unless other hosts serve the other parts
    key_file: Path | None = None  #: service.key; None unless the graph service is encrypted
    remote_access: RemoteAccess = RemoteAccess()
    digests: bool = True  #: compare files with their digests, unless a graph server of this node has compared them

    @property
    def timeout(self) -> float:
        """Timeout in seconds of waits for other processes."""
        return self.settings.timeout


@dataclass(frozen=True)
class InferJob:
    checkpoint: Path  #: checkpoint file; only rank 0 reads it
    parts: Path | None  #: partition folder; None on a client node, which has no parts
    out: Path  #: folder for results
    part_ids: tuple[int, ...] | None = None  #: this field and those without a comment are as in ``TrainJob``
    cluster: Path | None = None
    key_file: Path | None = None
    remote_access: RemoteAccess = RemoteAccess()
    nodes_at_once: int = 4096  #: nodes computed at a time; bounds memory
    timeout: float = 120.0  #: seconds that a wait for another process may take
    digests: bool = True
    top_k: int | None = None  #: task link: targets listed per source; None: 10, or 0 if there are very many pairs
    without_held_out: bool = False  #: task link: links held out for val and test are not listed
    pairs: Path | None = None  #: task link: CSV file of pairs to score
    parquet: bool | None = None  #: also write Parquet files; None: if DuckDB is installed
    probabilities: bool = False  #: task classification: a column for the probability of each class
    fanouts: tuple[int, ...] | None = None  #: of an own class without layers; -1: all; None: as in evaluation

    def __post_init__(self) -> None:
        if self.fanouts and any(fanout < 1 and fanout != -1 for fanout in self.fanouts):
            raise SettingsError(f"fanouts is {list(self.fanouts)}; each must be at least 1, or -1 for all")


@functools.cache
def _keyed_settings() -> dict[str, Any]:
    """Return the classes of the settings that have keys of their own, by name; ``Mapping`` for any keys."""
    hints = {name: typing.get_args(hint) for name, hint in typing.get_type_hints(TrainSettings).items()}
    first: dict[str, Any] = {name: typing.get_origin(kinds[0]) or kinds[0] for name, kinds in hints.items() if kinds}
    return {name: kind for name, kind in first.items() if is_dataclass(kind) or kind is Mapping}


def _with_keys(name: str, kind: Any, value: Any) -> Any:
    """Return a setting with keys of its own, made from a mapping; any other value stands for its first key."""
    if kind is Mapping:
        if isinstance(value, Mapping):
            return value
        if name == "track":
            return {str(tracker): {} for tracker in (value if isinstance(value, list | tuple) else [value])}
        if name == "optimizer":
            return {"name": value}
        raise SettingsError(f"{name} is {value!r}; it must be keys with values")
    if isinstance(value, kind):
        return value
    known = [entry.name for entry in fields(kind)]
    keys = value if isinstance(value, Mapping) else {known[0]: value}
    if unknown := sorted(keys.keys() - set(known)):
        raise SettingsError(f"{name} has no key {unknown[0]!r}; its keys are {', '.join(known)}")
    hints, converted = typing.get_type_hints(kind), {}
    for key, given in keys.items():
        try:
            converted[key] = convert(given, hints[key], strict=False)
        except msgspec.ValidationError as error:
            words = [*typing.get_args(hints[key])] if typing.get_origin(hints[key]) is Literal else []
            known_words = f"; there are {', '.join(words)}" if words else ""
            raise SettingsError(f"{name}.{key} is {given!r}: {error}{known_words}") from None
    try:
        made = kind(**converted)
    except TypeError:  # the first key is the only one without a default
        raise SettingsError(f"{name}: its {known[0]} is missing") from None
    if problems := [*_beyond_limits(made)]:
        raise SettingsError("\n".join(f"{name}.{problem}" for problem in problems))
    return made


class _Keyed(click.ParamType):
    """Value of an option with keys of its own: a JSON object, a JSON list of names, or the value of its first key."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)


class _NumberOrWord(click.ParamType):
    """Value of an option: a whole number, or one of ``words``."""

    name = "n"

    def __init__(self, words: tuple[str, ...]):
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._words or isinstance(value, int):
            return value
        if not str(value).lstrip("-").isdecimal():
            self.fail(f"{value!r} is not a whole number or {' or '.join(self._words)}", param, ctx)
        return int(value)


class NumberList(click.ParamType):
    """Value of an option: comma-separated numbers of a type, such as ``15,10,5``, or one of ``words``."""

    name = "n,n,…"

    def __init__(self, number: type = int, words: tuple[str, ...] = ()):
        self._number, self._words = number, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple) or value in self._words:
            return value
        try:
            return tuple(self._number(word) for word in str(value).split(","))
        except ValueError:
            kind = "".join(f"{word} or " for word in self._words) + "a list of"
            numbers = "whole numbers" if self._number is int else "numbers"
            self.fail(f"{value!r} is not {kind} {numbers} like 15,10,5", param, ctx)


def settings_options(function: F) -> F:
    """Give a click command one option per field of ``TrainSettings``."""
    hints = typing.get_type_hints(TrainSettings)
    for entry in reversed(fields(TrainSettings)):
        flag, hint = "--" + entry.name.replace("_", "-"), hints[entry.name]
        help = re.sub(r"`(?:train\.)?([^`]*)`", r"\1", entry.metadata["help"])
        if keyed := _keyed_settings().get(entry.name):
            if is_dataclass(keyed):
                keys = " ".join(f"{key.name}: {key.metadata['help']}" for key in fields(keyed))
                help = re.sub(r"`(?:train\.)?([^`]*)`", r"\1", f"{help} Keys, in JSON: {keys}")
            else:
                help += " In JSON."
            option = click.option(flag, type=_Keyed(), help=help)
        elif hint is bool:
            option = click.option(f"{flag}/--no-{flag[2:]}", default=entry.default, help=help, show_default=True)
        else:
            option = click.option(
                flag,
                type=_click_type(hint),
                default=entry.default,
                help=help,
                show_default=",".join(map(str, entry.default)) if isinstance(entry.default, tuple) else True,
            )
        function = option(function)
    return function


def _click_type(hint: Any) -> click.ParamType:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return click.Choice(options)
    words: tuple[str, ...] = ()
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        words = tuple(word for option in options if typing.get_origin(option) is Literal for word in option.__args__)
        (hint,) = (one for one in options if one is not type(None) and typing.get_origin(one) is not Literal)
    if typing.get_origin(hint) is tuple:
        return NumberList(typing.get_args(hint)[0], words)
    if words:
        return _NumberOrWord(words)
    plain: dict[Any, click.ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING}
    return plain[hint]


def _beyond_limits(settings: Any) -> Iterator[str]:
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if isinstance(value, float) and math.isinf(value) and "below" not in entry.metadata["limits"]:
            yield f"{entry.name} is {value}; it must be finite"
        for name, limit in entry.metadata["limits"].items():
            words, holds = _LIMITS[name]
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not holds(number, limit):
                    yield f"{entry.name} is {number}; it must be {words} {limit}"
