"""Converts a YAML tree into the config dataclasses and reports unknown keys, wrong types and exceeded limits."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, is_dataclass, replace
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launcher.config.schema import ClusterConfig, NodeConfig, settings
from launcher.errors import Problem
from launcher.hostlist import PORTS_FROM, SSH_PORT, RangeError, expand, is_range
from launcher.yaml_tree import (
    FLOAT,
    Origin,
    Report,
    Scalar,
    Section,
    Tree,
    YamlSequence,
    describe,
    expand_nodes,
    is_count,
    shortened,
)
from trainer.core.train_config import Named

KeyPath = tuple[str | int, ...]  #: path of a key in the config, as ("nodes", 0, "procs")

_INT = re.compile(r"[-+]?\d[\d_]{0,18}")  # fits into 64 bits

_HOST = re.compile(
    r"(?:(?P<user>\S+)@)?(?P<host>\[[^\]\s]+\]|[^\s:@]+|(?=[^\s@:]*:[^\s@:]*:)[^\s@]+)(?::(?P<port>\d+))?"
)

_TRAINING_KEYS = ("procs", "devices")  #: keys of a node that do not apply to servers


_SET_ON_ALL = "--set nodes.*."  #: prefix of the origin of a value that was set on every node

_hints = cache(get_type_hints)


class _Wrong(Exception):
    """A value has the wrong type or is outside its limits; the message names neither file nor key."""


@dataclass
class Reader:
    """Converts trees to values, reports invalid ones, and records the file and line of each value."""

    report_problem: Report
    origins: dict[KeyPath, Origin] = field(default_factory=dict)  #: of every key that the user gave
    bad: set[KeyPath] = field(default_factory=set)  #: keys with an invalid value
    _replaced: dict[int, str] = field(default_factory=dict)  #: ``NodeConfig.replaces`` by node_rank

    def report(self, path: KeyPath, message: str) -> None:
        """Report a problem at the line of ``path`` or, if the user did not write this key, of the section around it."""
        origin = self.origin(path)
        self.bad.add(path)
        self.report_problem(Problem(origin.file, origin.line, message))

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of ``path``, or of the innermost enclosing section that the user wrote."""
        return next(self.origins[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.origins)

    def given(self, path: KeyPath) -> bool:
        """Whether the user gave this key in the file, in `defaults` or with --set."""
        return path in self.origins

    def good(self, *paths: KeyPath) -> bool:
        """Return whether these keys, and all keys inside them, are free of reported problems."""
        return not any(bad[: len(path)] == path for path in paths for bad in self.bad)

    def cluster(self, tree: Section) -> ClusterConfig:
        """Convert the tree of a whole file. Invalid values become defaults, and their keys are added to ``bad``."""
        items, keys = dict(tree.items), dict(tree.keys)
        defaults = self._defaults(items.pop("defaults", None))
        keys.pop("defaults", None)
        self.origins[()] = tree.origin
        if "nodes" in items:
            items["nodes"] = self._nodes(items["nodes"], defaults, items.get("transport"))
        config = self._section(ClusterConfig, Section(tree.origin, items, keys), ())
        assert isinstance(config, ClusterConfig)
        if not self._replaced:
            return config
        nodes = (replace(node, replaces=self._replaced.get(k, "")) for k, node in enumerate(config.nodes))
        return replace(config, nodes=tuple(nodes))

    def _defaults(self, tree: Tree | None) -> Section | None:
        """Return the valid keys of `defaults`; report the invalid ones once, not for each node."""
        if tree is None or isinstance(tree, Scalar) and tree.empty:
            return None
        self.origins[("defaults",)] = tree.origin
        if not isinstance(tree, Section):
            self.report(("defaults",), f"defaults: expected keys of a node, found {describe(tree)}")
            return None
        tree = self._split_host(("defaults",), tree)
        self._read_fields(NodeConfig, tree, ("defaults",))
        known = {field.name for field in settings(NodeConfig)}
        usable = {name for name in tree.items if name in known and self.good(("defaults", name))}
        return replace(tree, items={name: tree.items[name] for name in usable})

    def _nodes(self, tree: Tree, defaults: Section | None, transport: Tree | None) -> Tree:
        local = isinstance(transport, Scalar) and transport.text == "local"
        self.origins[("nodes",)] = tree.origin
        if is_count(tree) and not local:
            self.report(("nodes",), "nodes: a number of nodes needs `transport: local`; list the hosts instead")
        try:
            listed = expand_nodes(tree)
            if not isinstance(listed, YamlSequence):
                return listed
        except RangeError as error:
            self.report(("nodes",), f"nodes: {error}")
            return YamlSequence(tree.origin, ())
        return YamlSequence(tree.origin, tuple(self._node(i, item, defaults) for i, item in enumerate(listed.items)))

    def _node(self, index: int, tree: Tree, defaults: Section | None) -> Tree:
        if isinstance(tree, Scalar) and not tree.empty:
            tree = Section(tree.origin, {"host": tree}, {"host": tree.origin})
        if not isinstance(tree, Section):
            return tree
        node = self._split_host(("nodes", index), tree)
        if _is_server(node) or "role" not in node.items and defaults and _is_server(defaults):
            # Servers do not train: a key set for all nodes, as by ``--set nodes.*.procs=2``, does not concern them.
            set_on_all = {
                name
                for name in _TRAINING_KEYS
                if name in node.items and node.items[name].origin.file.startswith(_SET_ON_ALL)
            }
            node, defaults = _without(node, set_on_all), defaults and _without(defaults, _TRAINING_KEYS)
        if not defaults:
            return node
        if note := _replaced_environment(node, defaults):
            self._replaced[index] = note
        # Add defaults to a node. Keys of the node take precedence; the variables in ``env`` are merged.
        inherited = dict(defaults.items)
        if any(name in node.items for name in _ENVIRONMENT):
            inherited = {name: item for name, item in inherited.items() if name not in _ENVIRONMENT}
        items = {**inherited, **node.items}
        own, common = node.items.get("env"), inherited.get("env")
        if isinstance(own, Section) and isinstance(common, Section):
            items["env"] = Section(own.origin, {**common.items, **own.items}, {**common.keys, **own.keys})
        return Section(node.origin, items, node.keys)

    def _split_host(self, path: KeyPath, node: Section) -> Section:
        """Split ``host: user@host:port`` into the keys user, host and port."""
        host = node.items.get("host")
        if not isinstance(host, Scalar) or host.empty:
            return node
        match = _HOST.fullmatch(host.text)
        wrong = ""
        if is_range(host.text):
            try:
                wrong = f"`{host.text}` expands to {len(expand(host.text))} hosts; list it under nodes"
            except RangeError as error:
                wrong = str(error)
        if not match and not wrong:
            wrong = f"expected host, user@host or user@host:port, found `{shortened(host.text)}`"
        if match and match["port"] and int(match["port"]) < PORTS_FROM and int(match["port"]) != SSH_PORT:
            number = match["port"]
            wrong = f"`{shortened(host.text)}` may mean an SSH port or {number} processes; write the host alone, "
            wrong += f"and the key `port: {number}` or `procs: {number}`"
        if not match or wrong:
            self.origins[path] = host.origin
            self.report(path, f"{dotted(path)}.host: {wrong}")
            return node
        found = {name: Scalar(host.origin, text.strip("[]"), "str") for name, text in match.groupdict().items() if text}
        for name in sorted(found.keys() & node.items.keys() - {"host"}):
            self.origins[path] = host.origin
            self.report(path, f"{dotted(path)}: {name} is given twice, in host and as a key of its own")
        return Section(node.origin, {**node.items, **found}, node.keys)

    def _section(self, cls: type, tree: Tree, path: KeyPath) -> Any:
        if isinstance(tree, Scalar) and tree.empty:
            tree = Section(tree.origin, {}, {})
        if not isinstance(tree, Section):
            raise _Wrong(f"expected keys such as `{settings(cls)[0].name}:`, found {describe(tree)}")
        values = self._read_fields(cls, tree, path)
        for item in settings(cls):
            if item.name not in values:
                # in bad: the key was given, but misspelt or misplaced
                if not _has_default(item) and (*path, item.name) not in self.bad:
                    self.origins.setdefault(path, tree.origin)
                    self.missing(item, path)
                values[item.name] = _placeholder(item)
        return cls(**values)

    def _read_fields(self, cls: type, tree: Section, path: KeyPath) -> dict[str, Any]:
        hints, known = _hints(cls), {item.name: item for item in settings(cls)}
        values: dict[str, Any] = {}
        for name, value in tree.items.items():
            if name not in known:
                self._unknown(name, cls, tree.keys.get(name, value.origin), path)
                continue
            here = (*path, name)
            if isinstance(value, Scalar) and value.empty and _has_default(known[name]):
                continue
            self.origins[here] = value.origin if isinstance(value, Scalar) else tree.keys.get(name, value.origin)
            try:
                values[name] = self._value(hints[name], value, here)
                _check_limits(known[name], values[name])
                if path not in self.bad:  # a host that could not be split is reported once
                    _check_forms(known[name], values[name])
            except _Wrong as wrong:
                self.report(here, f"{dotted(here)}: {wrong}{_seconds_hint(known[name], value)}")
                values[name] = _placeholder(known[name])
        return values

    def missing(self, item: Field[Any], path: KeyPath) -> None:
        kind = "section" if is_dataclass(_hints(ClusterConfig).get(item.name)) else "key"
        place = f" in {dotted(path)}" if path else ""
        self.report((*path, item.name), f"missing {kind} `{item.name}`{place}: {_help(item)}")

    def _unknown(self, name: str, cls: type, at: Origin, path: KeyPath) -> None:
        place = f"in {dotted(path)}" if path else "at the top level"
        known = [item.name for item in settings(cls)] + ([] if path else ["defaults"])
        near = difflib.get_close_matches(name.lower(), known, 1)
        others = {where: section for where, section in sections().items() if section is not cls}
        elsewhere = [where for where, section in others.items() if any(item.name == name for item in settings(section))]
        elsewhere = [where for where in elsewhere if not where.startswith("train.")]  # few users mean these
        if elsewhere:
            words = {"nodes": "in an entry of nodes, or in defaults", "": "at the top level"}
            hint = "it belongs " + " or ".join(words.get(where, f"in {where}") for where in elsewhere)
        else:
            hint = f"did you mean `{near[0]}`?" if near else f"the keys here are {', '.join(known)}"
        self.bad |= {(*path, near[0])} if near and not elsewhere else {(*where.split("."), name) for where in elsewhere}
        self.report_problem(Problem(at.file, at.line, f"unknown key `{name}` {place}; {hint}"))

    def _value(self, wanted: Any, tree: Tree, path: KeyPath) -> Any:
        kind = get_origin(wanted)
        if kind in (Union, types.UnionType):
            return self._one_of_types([kind for kind in get_args(wanted) if kind is not type(None)], tree, path)
        if kind is Literal:
            return _choice(get_args(wanted), tree)
        if kind is tuple:
            return self._tuple(get_args(wanted)[0], tree, path)
        if kind is not None and issubclass(kind, Mapping):
            return self._mapping(get_args(wanted)[1], tree)
        if is_dataclass(wanted):
            return self._section(wanted, tree, path)  # type: ignore[arg-type]
        return _plain_value(tree) if wanted is Any else _scalar(wanted, tree)

    def _one_of_types(self, kinds: list[Any], tree: Tree, path: KeyPath) -> Any:
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if has_keys(kinds[0]):
            tree = short_form(kinds[0], tree)
        if isinstance(tree, Scalar) and tree.text in words:
            return tree.text
        rest = next((kind for kind in kinds if get_origin(kind) is not Literal), None)
        if rest is None:
            return _choice(tuple(words), tree)
        if rest is int and str in kinds and isinstance(tree, Scalar) and not (tree.empty or _INT.fullmatch(tree.text)):
            return _scalar(str, tree)
        try:
            return self._value(rest, tree, path)
        except _Wrong as wrong:
            also = "".join(f" or `{word}`" for word in words)
            raise _Wrong(str(wrong).replace(", found", f"{also}, found", 1)) from None

    def _tuple(self, kind: Any, tree: Tree, path: KeyPath) -> tuple[Any, ...]:
        if isinstance(tree, Scalar) and kind is str and not tree.empty:
            return (tree.text,)
        if isinstance(tree, Scalar) and get_origin(kind) is Literal and not tree.empty:
            return (_choice(get_args(kind), tree),)
        from_shell = isinstance(tree, Scalar) and bool(_INT.fullmatch(tree.text)) and not tree.origin.line
        if isinstance(tree, Scalar) and kind in (int, int | str) and ("," in tree.text or from_shell):
            tree = YamlSequence(
                tree.origin, tuple(Scalar(tree.origin, word.strip(), "") for word in tree.text.split(","))
            )
        if not isinstance(tree, YamlSequence):
            examples: dict[Any, str] = {int: " such as [2, 1]", int | str: " such as [0, 1]", str: ""}
            example = examples.get(kind, " of hosts" if kind is NodeConfig else "")
            raise _Wrong(f"expected a list{example}, found {describe(tree)}")
        values = []
        for i, item in enumerate(tree.items):
            here = (*path, i)
            self.origins[here] = item.origin
            try:
                value = self._value(kind, item, here)
            except _Wrong as wrong:
                self.report(here, f"{dotted(here)}: {wrong}")
                if get_origin(kind) is Literal:
                    value = get_args(kind)[0]
                else:
                    value = NodeConfig(host="") if kind is NodeConfig else 0 if kind == int | str else kind()
            values.append(value)
        return tuple(values)

    def _mapping(self, kind: Any, tree: Tree) -> dict[str, Any]:
        if not isinstance(tree, Section):
            raise _Wrong(f"expected a section of keys, found {describe(tree)}")
        plain = kind is Any or get_origin(kind) is Mapping
        values = {}
        for name, item in tree.items.items():
            try:
                values[name] = _plain_value(item) if plain else _scalar(kind, item)
            except _Wrong as wrong:
                raise _Wrong(f"{name}: {wrong}") from None
        return values


def has_keys(kind: Any) -> bool:
    """Whether a type is that of a section, or of a mapping."""
    return is_dataclass(kind) or get_origin(kind) is Mapping


def short_form(kind: Any, tree: Tree) -> Tree:
    """Return the section or mapping of type ``kind`` for which a value is short; other values as they are.

    A value of the first key, as ``{patience: 3}`` for ``3``; that of a mapping of type ``Named`` is ``name``.
    For a mapping of options by name, a name, a list of names, or names without options, as ``{wandb: {}}`` for
    ``[wandb]`` and ``{wandb: }``.
    """
    if get_origin(kind) is Mapping and get_origin(get_args(kind)[1]) is Mapping:
        if isinstance(tree, Section):
            items = ((name, item) for name, item in tree.items.items() if isinstance(item, Scalar) and item.empty)
            return replace(tree, items={**tree.items, **{name: Section(item.origin, {}) for name, item in items}})
        names = tree.items if isinstance(tree, YamlSequence) else (tree,) if isinstance(tree, Scalar) else ()
        given = [name for name in names if isinstance(name, Scalar) and not name.empty]
        texts = {name.text: Section(name.origin, {}, {}) for name in given}
        if len(texts) < len(names):
            return tree
        return Section(tree.origin, texts, dict.fromkeys(texts, tree.origin))
    if not isinstance(tree, Scalar) or tree.empty or get_origin(kind) is Mapping and kind != Named:
        return tree
    name = settings(kind)[0].name if isinstance(kind, type) and is_dataclass(kind) else "name"
    return Section(tree.origin, {name: tree}, {name: tree.origin})


def dotted(path: KeyPath) -> str:
    """Return the path in the form that --set accepts, as ``nodes.0.procs``."""
    return ".".join(map(str, path))


def _plain_value(tree: Tree) -> Any:
    """Convert a tree to plain lists, dicts, texts and numbers. ``1e-3`` becomes a number."""
    if isinstance(tree, Section):
        return {name: _plain_value(item) for name, item in tree.items.items()}
    if isinstance(tree, YamlSequence):
        return [_plain_value(item) for item in tree.items]
    if not tree.plain or tree.tag == "str" and not FLOAT.fullmatch(tree.text):
        return tree.text
    if tree.empty:
        return None
    if tree.tag == "bool":
        return _scalar(bool, tree)
    number: type = int if _INT.fullmatch(tree.text) else float if FLOAT.fullmatch(tree.text) else str
    return _scalar(number, tree)


def sections(cls: type = ClusterConfig, name: str = "") -> dict[str, type]:
    """Return the config dataclasses by dotted name: "" is ``ClusterConfig``, ``nodes`` is ``NodeConfig``."""
    found = {name: cls}
    for key, hint in _hints(cls).items():
        inner = get_args(hint)[0] if get_origin(hint) in (tuple, Union, types.UnionType) else hint
        if isinstance(inner, type) and is_dataclass(inner):
            found |= sections(inner, f"{name}.{key}".lstrip("."))
    return found


def _is_server(node: Section) -> bool:
    role = node.items.get("role")
    return isinstance(role, Scalar) and role.text == "server"


def _without(node: Section, names: Collection[str]) -> Section:
    return replace(node, items={name: item for name, item in node.items.items() if name not in names})


_ENVIRONMENT = ("venv", "conda", "python")


def _replaced_environment(node: Section, defaults: Section) -> str:
    """Return a note if the node has another environment (python, venv or conda) than ``defaults``; else ''."""
    own, common = (
        [(name, one) for name in _ENVIRONMENT if isinstance(one := section.items.get(name), Scalar) and not one.empty]
        for section in (node, defaults)
    )
    if not own or not common or (own[0][0], own[0][1].text) == (common[0][0], common[0][1].text):
        return ""
    (name, value), (other, replaced) = own[0], common[0]
    where = f"{value.origin.file}:{value.origin.line}" if value.origin.line else value.origin.file
    return f"`{name}: {value.text}` of this node ({where}) replaces `{other}: {replaced.text}` of `defaults`"


def _scalar(wanted: type, tree: Tree) -> Any:
    names = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    if not isinstance(tree, Scalar) or tree.empty:
        raise _Wrong(f"expected {names[wanted]}, found {describe(tree)}")
    text = tree.text
    if wanted is str:
        return text
    if wanted is bool and tree.tag == "bool":
        return text.lower() in ("true", "yes", "on")
    number = text.replace("_", "") if tree.plain else ""
    if wanted is int and _INT.fullmatch(number):
        return int(number)
    if wanted is float and FLOAT.fullmatch(number) and math.isfinite(float(number)):
        return float(number)
    quoted = "" if tree.plain else " in quotes"
    raise _Wrong(f"expected {names[wanted]}, found {describe(tree)}{quoted}")


def _seconds_hint(item: Field[Any], tree: Tree) -> str:
    """Return ``; write 300 (seconds)`` for a value such as ``5min`` of a key in seconds; else ''."""
    match = re.fullmatch(
        r"(\d{1,9}(?:\.\d{1,9})?) ?(ms|s|sec|seconds|m|min|h)", tree.text if isinstance(tree, Scalar) else ""
    )
    if match is None or "econds" not in _help(item):
        return ""
    unit = {"ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}.get(match[2], 1.0)
    return f"; write {float(match[1]) * unit:g} (seconds)"


def _choice(choices: Iterable[str], tree: Tree) -> str:
    valid = list(choices)
    text = tree.text if isinstance(tree, Scalar) and not tree.empty else None
    if text in valid:
        return str(text)
    near = difflib.get_close_matches((text or "").lower(), valid, 1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    raise _Wrong(f"expected one of {', '.join(valid)}, found {describe(tree)}{hint}")


def _check_limits(item: Field[Any], value: Any) -> None:
    limits: Mapping[str, float] = item.metadata["limits"]
    tests = {
        "at_least": lambda n, limit: n >= limit,
        "above": lambda n, limit: n > limit,
        "at_most": lambda n, limit: n <= limit,
        "below": lambda n, limit: n < limit,
    }
    numbers = [n for n in (value if isinstance(value, tuple) else (value,)) if isinstance(n, (int, float))]
    for number in numbers:
        if not all(tests[name](number, limit) for name, limit in limits.items()):
            raise _Wrong(f"must be {limits_in_words(limits)}; found {number}")


def _check_forms(item: Field[Any], value: Any) -> None:
    """Raise _Wrong if a text in ``value`` does not have the form of its key. Values of any type are not checked."""
    named = isinstance(value, Mapping)
    texts = [(item.metadata["keys"], name) for name in value] if named else []
    found = value.values() if named else value if isinstance(value, tuple) else (value,)
    if not named and "" in found and (isinstance(value, tuple) or _default(item) != ""):
        raise _Wrong("is empty; leave it out, or give a value")
    texts += [(item.metadata["form"], text) for text in found if isinstance(text, str)]
    for form, text in texts:
        if not re.fullmatch(form.pattern, text):
            raise _Wrong(f"expected {form.words}, found {shortened(ascii(text))}")


def limits_in_words(limits: Mapping[str, float]) -> str:
    """Describe limits, as ``at least 0 and below 1``."""
    return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())


def _has_default(item: Field[Any]) -> bool:
    return item.default is not MISSING or item.default_factory is not MISSING


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _placeholder(item: Field[Any]) -> Any:
    # A valid value lets the rest of the file be checked.
    if _has_default(item):
        return _default(item)
    return {"nodes": (), "data": _hints(ClusterConfig)["data"](dataset="")}.get(item.name, "")


def _help(item: Field[Any]) -> str:
    text: str = item.metadata["help"]
    return text[:1].lower() + text[1:].rstrip(".")
