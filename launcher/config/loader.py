"""Loads cluster.yml, or a file of another launcher, into ``ClusterConfig``.

All problems of a file are raised together as one ``ConfigError``, each with file and line. Relative paths start from
the file that contains them; relative paths given with ``--set`` start from the current directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Sequence as Words
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml

from launcher.config.consistency import check, check_nodes
from launcher.config.schema import ClusterConfig
from launcher.config.validation import KeyPath, Reader, dotted, has_keys, short_form
from launcher.errors import ConfigError, Problem
from launcher.files import read_text
from launcher.hostlist import RangeError, fold
from launcher.yaml_tree import (
    MOST_BYTES,
    Dumper,
    Origin,
    Override,
    Report,
    Scalar,
    Section,
    Tree,
    YamlSequence,
    expand_nodes,
    read_tree,
    split_override,
    tree_of,
)
from trainer.core.train_config import TrainConfig

if TYPE_CHECKING:
    from launcher.config.importers.base import Foreign


def _apply_override(tree: Section, override: Override, report: Report) -> Section:
    """Return ``tree`` with one override applied.

    Relative paths in the value start from the current directory. An invalid override is reported and not applied.
    """
    key, text = split_override(override)
    name = f"--set {override}" if isinstance(override, str) else f"--set {key}={text}"
    words = key.split(".")
    if not all(words):
        report(Problem(name, 0, "expected key=value, for instance train.lr=0.01 or nodes.0.procs=2"))
        return tree
    origin = Origin(name, 0, Path.cwd())
    failed: list[Problem] = []
    changed: Tree = tree
    try:
        if isinstance(override, str):
            value = read_tree(text, name, origin.folder, failed.append, line=0) or tree_of(None, origin)
        else:
            value = tree_of(override[1], origin)
        if not failed:
            changed = _put(tree, words, value, origin)
    except (LookupError, RangeError, ValueError) as error:
        failed.append(Problem(name, 0, str(error.args[0])))
    for problem in failed:
        report(problem)
    assert isinstance(changed, Section)
    return changed


def _put(tree: Tree, words: Words[str], value: Tree, origin: Origin, path: str = "") -> Tree:
    """Return ``tree`` with ``value`` at the key path ``words``; ``path`` is the dotted path of ``tree`` itself.

    Raises LookupError with a message for the user.
    """
    if not words:
        return value
    word, here = words[0], f"{path}.{words[0]}".lstrip(".")
    tree = _long_form(tree, path, word)
    if isinstance(tree, YamlSequence):
        items = list(tree.items)
        if word == "*":
            return YamlSequence(tree.origin, tuple(_put(item, words[1:], value, origin, here) for item in items))
        if not word.isdecimal() or len(word) > 9 or int(word) >= len(items):
            raise LookupError(f"{path} has entries 0 to {len(items) - 1}, but no `{word}`")
        items[int(word)] = _put(items[int(word)], words[1:], value, origin, here)
        return YamlSequence(tree.origin, tuple(items))
    if word == "*":
        raise LookupError(f"{path or 'the top level'} is not a list, so `*` cannot be used there")
    if isinstance(tree, Scalar) and not tree.empty:
        raise LookupError(f"{path} is `{tree.text}`, which has no keys")
    items_now = tree.items if isinstance(tree, Section) else {}
    keys_now = tree.keys if isinstance(tree, Section) else {}
    below = items_now.get(word, Scalar(origin, "", "null"))
    items_now = {**items_now, word: _put(below, words[1:], value, origin, here)}
    return Section(tree.origin, items_now, {**keys_now, word: keys_now.get(word, origin)})


def _long_form(tree: Tree, path: str, word: str) -> Tree:
    """Expand ``nodes: 2``, ``- node[01-04]``, ``- user@host``, ``early_stop: 3`` and the like to entries with keys."""
    if path == "nodes" and (word.isdecimal() or word == "*"):
        return expand_nodes(tree)
    if path.startswith("nodes.") and path.count(".") == 1 and isinstance(tree, Scalar) and not tree.empty:
        return Section(tree.origin, {"host": tree}, {"host": tree.origin})
    if path.startswith("train."):
        kinds = get_args(get_type_hints(TrainConfig).get(path.removeprefix("train.")))
        return short_form(kinds[0], tree) if kinds and has_keys(kinds[0]) else tree
    return tree


def resolve_paths(config: ClusterConfig, reader: Reader) -> ClusterConfig:
    """Return ``config`` with relative paths made absolute, starting from the file that contains them.

    ``runs_dir`` stays relative to the current directory. A relative path on an SSH host and a missing file of
    ``run.files`` are reported as problems.
    """
    local = config.local
    _check_path(reader, ("run", "runs_dir"), config.run.runs_dir)
    nodes = []
    for k, node in enumerate(config.nodes):
        changes: dict[str, str] = {}
        if node.key:
            changes["key"] = _here(reader, ("nodes", k, "key"), node.key)
        for name in ("workdir", "data_folder", "venv", "conda", "python"):
            text = getattr(node, name)
            if text and ("/" in text or name not in ("conda", "python")):
                changes[name] = _on_node(reader, ("nodes", k, name), text, local)
        nodes.append(replace(node, **changes))  # type: ignore[arg-type]
    data, run, train = config.data, config.run, config.train
    if data.mode == "sync":
        folder = _here(reader, ("data", "folder"), data.folder)
    else:
        folder = _on_node(reader, ("data", "folder"), data.folder, local)
    source = _here(reader, ("data", "source"), data.source) if data.source else None
    resume = _checkpoint(reader, ("train", "resume"), train.resume) if train.resume else None
    place = ("train", "start", "checkpoint")
    start = train.start and replace(train.start, checkpoint=_checkpoint(reader, place, train.start.checkpoint))
    files = []
    for i, file in enumerate(run.files):
        at = ("run", "files", i)
        files.append(_here(reader, at, file))
        if reader.good(at) and not os.path.exists(files[-1]):
            reader.report(at, f"run.files: no file or folder `{files[-1]}` on this machine")
    return replace(
        config,
        nodes=tuple(nodes),
        data=replace(data, folder=folder, source=source),
        train=replace(train, resume=resume, start=start),
        run=replace(run, files=tuple(files), runs_dir=os.path.expanduser(run.runs_dir)),
    )


def _check_path(reader: Reader, place: KeyPath, text: str) -> None:
    """Report a variable, or the home folder of an unknown user, which would become the name of a folder."""
    wrong = ""
    if variable := _VARIABLE.search(text):
        wrong = f"`{variable[0]}` is not replaced in paths; write its value, or ~/ for the home folder"
    elif text.startswith("~") and os.path.expanduser(text) == text:
        wrong = f"there is no user {text.partition('/')[0][1:]} on this machine, or no home folder"
    if wrong and reader.good(place):
        reader.report(place, f"{dotted(place)}: `{text}`: {wrong}")


def _here(reader: Reader, place: KeyPath, text: str) -> str:
    _check_path(reader, place, text)
    return os.path.normpath(reader.origin(place).folder / os.path.expanduser(text))


def _on_node(reader: Reader, place: KeyPath, text: str, local: bool) -> str:
    if text.startswith(("/", "~/")):
        _check_path(reader, place, text)
        return text
    if local:
        return _here(reader, place, text)
    if reader.good(place):
        message = f"is a path on the node, so it must begin with / or ~/; found `{text}`"
        reader.report(place, f"{dotted(place)} {message}")
    return text


def _checkpoint(reader: Reader, place: KeyPath, text: str) -> str:
    path = _here(reader, place, text)
    return path if Path(path).is_file() else text


_Choose = Callable[[ClusterConfig], ClusterConfig]

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")

_EACH_LINE = 3  # a mistake that stands in more lines than this is reported with the first of them only

_NODE = re.compile(r"\bnodes\.\d+")


def load_config(
    path: Path,
    overrides: Sequence[Override] = (),
    choose: _Choose = lambda config: config,
    foreign: Foreign | None = None,
) -> ClusterConfig:
    """Read the file, apply overrides, select nodes, and check the result.

    A file of another launcher is converted first. All nodes of the file are checked one by one; then the selected nodes
    are checked together.

    ``choose``: returns the config with only the selected nodes. ``foreign``: the converted file, if the caller has
    converted it already. Raises ConfigError with all problems found.
    """
    problems: list[Problem] = []

    tree = overridden(path, overrides, foreign, problems.append)
    reader = Reader(problems.append)
    config = resolve_paths(reader.cluster(tree), reader)
    check_nodes(config, reader)
    chosen = config if problems else choose(config)
    check(chosen, reader)
    if problems:
        raise ConfigError(sorted(_folded(problems), key=lambda problem: (problem.line == 0, problem.line)))
    return chosen


def overridden(path: Path, overrides: Sequence[Override], foreign: Foreign | None, report: Report) -> Section:
    """Return the file as a tree with the overrides applied. Raises ConfigError if the file cannot be read at all."""
    from launcher.config.importers.detect import read_foreign

    foreign = foreign or read_foreign(path)
    if foreign:
        tree = foreign.tree
    else:
        try:
            text = read_text(path, MOST_BYTES)
        except ValueError as error:
            raise ConfigError([Problem(str(path), 1, str(error))]) from None
        except OSError as error:
            raise ConfigError([Problem(str(path), 0, f"cannot be read: {error.strerror}")]) from None
        found: list[Problem] = []
        whole = read_tree(text, str(path), path.absolute().parent, found.append)
        if whole is None or isinstance(whole, Scalar) and whole.empty:
            raise ConfigError(found or [Problem(str(path), 1, "the file is empty; start from templates/cluster.yml")])
        if not isinstance(whole, Section):
            text = "expected keys such as `nodes:` and `data:`, or one host per line, as `gnn1` or `gnn1 slots=8`"
            raise ConfigError([Problem(str(path), whole.origin.line, text)])
        for problem in found:
            report(problem)
        tree = Section(Origin(str(path), 1, whole.origin.folder), whole.items, whole.keys)

    first = []  # those that can change which nodes the config has
    for override in overrides:
        key = split_override(override)[0]
        if key in ("nodes", "transport", "slurm_job") or key.partition(".")[0] == "slurm":
            first.append(override)
    for override in first:
        tree = _apply_override(tree, override, report)
    transport = tree.items.get("transport")
    if isinstance(transport, Scalar) and transport.text == "slurm":
        from launcher.config.allocation import with_allocation

        tree = with_allocation(tree, transport.origin, os.environ, report)
    for override in (one for one in overrides if one not in first):
        tree = _apply_override(tree, override, report)
    if foreign and "data" not in tree.items:
        what = f"{foreign.kind} does not name the graph to train on; add --dataset ogbn-products"
        more = "--dataset graph.pt (your own file or folder), or --dataset synthetic (a generated graph)"
        raise ConfigError([Problem(str(path), 0, f"{what}, {more}")])
    return tree


def world_size(tree: Section, choose: _Choose) -> int:
    """Return the number of training processes of the nodes that ``choose`` selects; invalid values become defaults."""
    reader = Reader(lambda problem: None)
    nodes = {name: tree.items[name] for name in ("nodes", "defaults", "transport") if name in tree.items}
    config = reader.cluster(Section(tree.origin, nodes, tree.keys))
    return (choose(config) if not reader.bad - {("data",)} else config).world_size


def to_yaml(config: ClusterConfig) -> str:
    """Return ``config`` as YAML that ``load_config`` reads back to equal settings."""
    return yaml.dump(_plain(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _folded(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield a mistake that several nodes have once: of a host range or of ``defaults``, or in many nodes' lines."""
    nodes = {problem: found[0] if (found := _NODE.search(problem.message)) else "" for problem in problems}
    alike: dict[str, dict[int, list[Problem]]] = {}  # by the message without the node, and by line
    for problem in problems:
        generic = f"{problem.file} {_NODE.sub('nodes.*', problem.message, count=1)}"
        alike.setdefault(generic, {}).setdefault(problem.line, []).append(problem)
    groups: list[list[Problem]] = []
    for lines in alike.values():
        together = len(lines) > _EACH_LINE and nodes[next(iter(lines.values()))[0]]
        groups += [[one for line in lines.values() for one in line]] if together else lines.values()
    for first, *others in groups:
        more = f" (also {fold(nodes[one] for one in others)})" if others and nodes[others[0]] else ""
        yield replace(first, message=first.message + more)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in fields(value) if field.metadata)
        return {name: _plain(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value
