"""Reads the YAML of GraphLearn-for-PyTorch's (GLT's) launcher: parallel lists with one entry per node."""

from __future__ import annotations

import os

from launcher.config.importers.base import (
    Flags,
    Foreign,
    Source,
    listed,
    number,
    parts_note,
    section,
    text,
    virtual_origin,
)
from launcher.config.importers.partition_folder import find_parts
from launcher.errors import ConfigError, Problem
from launcher.yaml_tree import Scalar, Section, Tree, YamlSequence, describe, read_tree

#: GLT's lists that are converted, besides `nodes`.
LISTS = ("ports", "usernames", "python_bins", "dst_paths", "visible_devices", "node_ranks")

_COUNTS = ("in_channel", "out_channel")

_OUR_KEYS = ("data", "train", "run", "defaults", "transport", "host_keys")

#: Settings hard-coded in GLT's dist_train_sage_supervised.py.
_TRAIN_SETTINGS = {"hidden": "256", "dropout": "0.0", "lr": "0.01"}

_FANOUTS = (15, 10, 5)


def read_glt(source: Source, flags: Flags) -> Foreign:
    """Convert a file of GLT.

    Raises ConfigError for lists of unequal length, invalid node_ranks, and keys that only a cluster.yml may have.
    """
    problems: list[Problem] = []
    tree = read_tree(source.text, source.name, source.path.absolute().parent, problems.append)
    if problems or not isinstance(tree, Section):
        raise ConfigError(problems)
    nodes = _list(tree, "nodes", problems)
    lists = {name: _list(tree, name, problems) for name in LISTS if name in tree.items}
    for name, values in lists.items():
        if isinstance(tree.items[name], YamlSequence) and len(values) != len(nodes):
            at, first = tree.keys[name], tree.keys.get("nodes", tree.origin)
            words = f"{name} has {len(values)} {'entry' if len(values) == 1 else 'entries'}, but nodes "
            words += f"(line {first.line}) has {len(nodes)}; give one entry per node"
            problems.append(Problem(at.file, at.line, words))
    for name in tree.items:
        if name in _OUR_KEYS:
            at = tree.keys[name]
            words = (
                f"`{name}` is a key of gnnfleet in a file of GLT; do not mix both (`gnnfleet import` converts GLT's)"
            )
            problems.append(Problem(at.file, at.line, words))
    order, ranks = list(range(len(nodes))), lists.get("node_ranks")
    if ranks is not None and not problems:
        texts = [rank.text if isinstance(rank, Scalar) else "" for rank in ranks]
        if sorted(texts) == sorted(map(str, order)):
            order.sort(key=lambda k: int(texts[k]))
        else:
            at = tree.keys["node_ranks"]
            problems.append(Problem(at.file, at.line, f"node_ranks: expected each of 0 to {len(texts) - 1} once"))
    if problems:
        raise ConfigError(sorted(set(problems), key=lambda problem: problem.line))

    # The config, with the settings of GLT's example.
    entries = [_node(nodes[k], {name: values[k] for name, values in lists.items()}) for k in order]
    items: dict[str, Tree] = {"nodes": listed(tree.keys["nodes"], entries)}
    dataset, origin = tree.items.get("dataset"), virtual_origin("as in GLT's example")
    if isinstance(dataset, Scalar) and not dataset.empty:
        items["data"] = section(dataset.origin, _data(dataset))
    train: dict[str, Tree] = {"model": text(origin, "sage")}
    train |= {name: number(origin, value) for name, value in _TRAIN_SETTINGS.items()}
    train["fanouts"] = listed(origin, [number(origin, fanout) for fanout in _FANOUTS])
    items["train"] = section(origin, train)

    notes = [
        "GLT asks for passwords, gnnfleet tries keys and the SSH agent; add --set 'nodes.*.password=true' to be asked"
    ]
    if ignored := [name for name in _COUNTS if name in tree.items]:
        notes.append(f"{' and '.join(ignored)} are ignored: they are read from the graph")
    known = {"nodes", "dataset", *LISTS, *_COUNTS}
    if more := [name for name in tree.items if name not in known]:
        notes.append(f"unknown keys are ignored: {', '.join(more)}")
    shown = {devices.text for devices in lists.get("visible_devices", ()) if isinstance(devices, Scalar)}
    if len({len(devices.split(",")) for devices in shown}) > 1:
        notes.append("each node gets one process per device of its own; GLT uses the device count of the first node")
    if flags.part_config or flags.dataset_root_dir:
        named = " and ".join(name for name in ("part_config", "dataset_root_dir") if getattr(flags, name))
        notes.append(parts_note(flags.parts, flags.dataset or "the file's", named))
    return Foreign("GLT's YAML", section(tree.origin, items), tuple(notes), batch_per_process=True)


def _list(tree: Section, name: str, problems: list[Problem]) -> tuple[Tree, ...]:
    found = tree.items.get(name)
    if isinstance(found, YamlSequence):
        return found.items
    origin = tree.keys.get(name, tree.origin)
    words = "is missing" if found is None else f"expected a list with one entry per node, found {describe(found)}"
    problems.append(Problem(origin.file, origin.line, f"{name}: {words}"))
    return ()


def _node(host: Tree, values: dict[str, Tree]) -> Section:
    items: dict[str, Tree] = {"host": _text(host)}
    for theirs, ours in (("ports", "port"), ("usernames", "user"), ("python_bins", "python")):
        if theirs in values:
            items[ours] = values[theirs] if theirs == "ports" else _text(values[theirs])
    folder = values.get("dst_paths")
    if isinstance(folder, Scalar):
        items["workdir"] = text(folder.origin, folder.text.rstrip("/") + "/gnnfleet-work/node{node_rank}")
    devices = values.get("visible_devices")
    if isinstance(devices, Scalar) and devices.text.strip() not in ("", "-1") and not devices.empty:
        words = [word.strip() for word in devices.text.split(",") if word.strip()]
        items["devices"] = listed(devices.origin, [number(devices.origin, word) for word in words])
    elif isinstance(devices, YamlSequence) and [getattr(one, "text", "") for one in devices.items] != ["-1"]:
        items["devices"] = devices
    return section(host.origin, items)


def _text(tree: Tree) -> Tree:
    # As text, a name such as 007 is not read as a number.
    return text(tree.origin, tree.text) if isinstance(tree, Scalar) and not tree.empty else tree


def _data(dataset: Scalar) -> dict[str, Tree]:
    """Return the `data` section for a dataset name, or for the path of a graph or partition folder.

    As in GLT's launcher, the parts of a dataset NAME are expected in ``../../data/NAME``, relative to the YAML file.
    """
    origin, name = dataset.origin, dataset.text
    path, is_path = origin.folder / os.path.expanduser(name), "/" in name or "." in name
    parts = find_parts(path if is_path else os.path.normpath(origin.folder / "../../data" / name))
    if parts is not None and (is_path or parts.labelled):
        keep = section(origin, {"method": text(origin, "keep")})
        items = {"dataset": "partition", "source": str(parts.folder), "folder": f"parts/{parts.name}"}
        return {**{key: text(origin, value) for key, value in items.items()}, "partition": keep}
    if os.path.exists(path) and is_path:
        return {
            "dataset": text(origin, "file"),
            "source": text(origin, name),
            "folder": text(origin, f"parts/{path.stem}"),
        }
    return {"dataset": text(origin, name), "folder": text(origin, f"parts/{name.replace(':', '-').replace('/', '-')}")}
