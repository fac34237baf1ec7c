"""The values that a sweep tries: choices and ranges of ``--set``, checked against the schema before anything starts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import yaml

from launcher.config.loader import to_yaml
from launcher.config.schema import ClusterConfig
from launcher.errors import ConfigError, Problem, UsageError
from launcher.run.config_of_options import read_config
from launcher.run.options import LaunchOptions
from launcher.yaml_tree import FLOAT

_Values = Mapping[str, str]  #: config key → value as in ``--set``

_RANGE = re.compile(r"(?P<low>[^,]+?)\.\.(?P<high>[^,]+?)(?P<log>,\s*log)?")

_MOST_CHECKED = 512  # combinations of choices that are checked one by one

#: Keys that are the same in all trials: their scores could not be compared, or each would need parts of its own.
_FIXED = (
    "name", "transport", "nodes", "defaults", "data.dataset", "data.source", "data.options", "data.serving",
    "data.folder", "data.num_parts", "data.partition", "data.replicas", "data.mode", "data.store", "run.runs_dir",
)  # fmt: skip

#: Keys of nodes that may differ all the same.
_OF_NODES = re.compile(r"(nodes\.(\*|\d+)|defaults)\.(env\..+|procs)")


class Choices(msgspec.Struct, frozen=True, tag=True):
    """A key, and the values that are tried, as texts of ``--set``."""

    key: str
    texts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key} {', '.join(self.texts)}"


class Range(msgspec.Struct, frozen=True, tag=True):
    """A key of a number, and the range from which its values are drawn, uniformly or uniformly in their logarithm."""

    key: str
    low: float
    high: float
    log: bool = False
    whole: bool = False  #: only whole numbers

    def __str__(self) -> str:
        form = "d" if self.whole else "g"
        low, high = (format(int(end) if self.whole else end, form) for end in (self.low, self.high))
        return f"{self.key} {low}..{high}{' (log)' if self.log else ''}"


Dimension = Choices | Range
Space = tuple[Dimension, ...]


def split_sets(sets: Sequence[str]) -> tuple[tuple[str, ...], Space]:
    """Return the values of ``--set`` that all trials share, and those that a sweep varies.

    ``train.lr=1e-3,1e-2`` lists values, ``train.fanouts=[15,10],[10,5]`` lists; ``train.lr=1e-4..1e-1,log`` is a range.
    Raises UsageError for an empty value, an invalid range, and a key that is given twice.
    """
    fixed: list[str] = []
    space: list[Dimension] = []
    for one in sets:
        key, _, text = (word.strip() for word in one.partition("="))
        items = _items(text)
        if found := _RANGE.fullmatch(text):
            low, high = found["low"].strip(), found["high"].strip()
            if not (FLOAT.fullmatch(low) and FLOAT.fullmatch(high)):
                fixed.append(one)  # such as a path
                continue
            ends = float(low), float(high)
            if not ends[0] < ends[1]:
                raise UsageError(f"--set {one}: the range begins at {low} and ends at {high}; give the lower one first")
            if found["log"] and ends[0] <= 0:
                raise UsageError(f"--set {one}: a range by logarithm begins above 0")
            space.append(Range(key, *ends, log=bool(found["log"])))
        elif len(items) > 1:
            if "" in items:
                raise UsageError(f"--set {one}: one of the values is empty")
            if doubled := sorted({item for item in items if items.count(item) > 1}):
                raise UsageError(f"--set {one}: {doubled[0]} is there twice")
            space.append(Choices(key, tuple(items)))
        else:
            fixed.append(one)
    keys = [dimension.key for dimension in space]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"--set {key}=…: given twice; list all its values in one --set")
    return tuple(fixed), tuple(space)


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets, braces and quotes; one item for text that is not YAML."""
    try:
        node = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return [item.strip() for item in text.split(",")] if "," in text and not set(text) & set("[]{}'\"") else [text]
    assert isinstance(node, yaml.SequenceNode)
    return [text[item.start_mark.index - 1 : item.end_mark.index - 1].strip() for item in node.value]


def checked_space(options: LaunchOptions, space: Space, first_hosts: Callable[[ClusterConfig], Sequence[str]]) -> Space:
    """Return the space with the types of its ranges, after all its values were checked against the schema.

    ``options``: those of all trials. ``first_hosts``: names of hosts for one trial, as of ``--include``. Raises
    ConfigError with the problems of all values, and UsageError for keys that a sweep cannot vary.
    """
    for dimension in space:
        key = dimension.key
        if any(key == name or key.startswith(f"{name}.") for name in _FIXED) and not _OF_NODES.fullmatch(key):
            why = "each value needs parts of its own" if key.startswith("data.") else "it is that of the whole sweep"
            raise UsageError(f"--set {key}=…: {why}. Start a sweep for each value, with its own --name")
        if options.own_command and key.startswith("train."):
            raise UsageError(
                f"--set {key}=…: your own command does not read it; vary variables of its environment, as "
                f"--set 'nodes.*.env.LR=0.1,0.01'"
            )
    config = read_config(options)
    hosts = tuple(first_hosts(config))
    problems: dict[Problem, None] = {}

    def load(values: _Values) -> ClusterConfig | None:
        overrides = (*options.overrides, *(f"{key}={text}" for key, text in values.items()))
        try:
            return read_config(replace(options, overrides=overrides, include=hosts or options.include))
        except ConfigError as error:
            problems.update(dict.fromkeys(error.problems))
            return None

    found: list[Dimension] = []
    for dimension in space:
        if isinstance(dimension, Choices):
            for text in dimension.texts:
                config_of = load({dimension.key: text})
                if config_of and isinstance(_value_at(config_of, dimension.key), list) and not text.startswith("["):
                    raise UsageError(
                        f"--set {dimension.key}={','.join(dimension.texts)}: its values are lists; write "
                        f"[{','.join(dimension.texts)}] for one value, or [15,10],[10,5] for two"
                    )
            found.append(dimension)
            continue
        ends = {repr(end): end for end in (dimension.low, dimension.high)}
        whole = all(end.is_integer() for end in ends.values())
        texts = [str(int(end)) if whole else text for text, end in ends.items()]
        values = [_value_at(made, dimension.key) for text in texts if (made := load({dimension.key: text}))]
        if values and not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            if not all(isinstance(value, str) and FLOAT.fullmatch(value) for value in values):
                raise UsageError(f"--set {dimension.key}={texts[0]}..{texts[1]}: is not a key with a number")
            values = [int(value) if whole else float(value) for value in values]  # of the environment
        whole = bool(values) and all(isinstance(value, int) for value in values)
        found.append(msgspec.structs.replace(dimension, whole=whole))
    if not problems:
        for values_of in itertools.islice(combinations(space), _MOST_CHECKED):
            load(values_of)
    if problems:
        raise ConfigError(list(problems))
    return tuple(found)


def combinations(space: Space) -> Iterator[dict[str, str]]:
    """Yield every combination of the choices, the last key changing fastest; keys with a range are left out."""
    choices = [dimension for dimension in space if isinstance(dimension, Choices)]
    for texts in itertools.product(*(dimension.texts for dimension in choices)):
        yield dict(zip((dimension.key for dimension in choices), texts, strict=True))


def _value_at(config: ClusterConfig, key: str) -> Any:
    """Return the value of a config key as plain YAML; None if the config has none there."""
    value: Any = yaml.safe_load(to_yaml(config))
    words = key.split(".")
    for word in ["nodes", "0", *words[1:]] if words[0] == "defaults" else words:
        if isinstance(value, list):
            value = value[int(word) if word.isdecimal() and int(word) < len(value) else 0] if value else None
        else:
            value = value.get(word) if isinstance(value, dict) else None
    return value
