"""Paths of a config made absolute: those of this machine, and those of nodes where nodes are this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.config.validation import Place, Reader, dotted


def resolve_paths(config: ClusterConfig, reader: Reader) -> ClusterConfig:
    """Relative paths start from the file they stand in; ``runs_dir`` from the current directory, later."""
    local = config.transport == "local"
    nodes = tuple(_node(node, k, local, reader) for k, node in enumerate(config.nodes))
    data, run, train = config.data, config.run, config.train
    if data.mode == "sync":
        folder = _here(reader, ("data", "folder"), data.folder)
    else:
        folder = _on_node(reader, ("data", "folder"), data.folder, local)
    source = _here(reader, ("data", "source"), data.source) if data.source else None
    resume = _checkpoint(reader, train.resume) if train.resume else None
    files = tuple(_existing(reader, ("run", "files", i), file) for i, file in enumerate(run.files))
    return replace(
        config,
        nodes=nodes,
        data=replace(data, folder=folder, source=source),
        train=replace(train, resume=resume),
        run=replace(run, files=files, runs_dir=os.path.expanduser(run.runs_dir)),
    )


def _node(node: NodeConfig, k: int, local: bool, reader: Reader) -> NodeConfig:
    changes: dict[str, str] = {}
    if node.key:
        changes["key"] = _here(reader, ("nodes", k, "key"), node.key)
    for name in ("workdir", "data_folder", "venv", "conda", "python"):
        text = getattr(node, name)
        if text and ("/" in text or name not in ("conda", "python")):
            changes[name] = _on_node(reader, ("nodes", k, name), text, local)
    return replace(node, **changes)  # type: ignore[arg-type]


def _here(reader: Reader, place: Place, text: str) -> str:
    return os.path.normpath(reader.origin(place).folder / os.path.expanduser(text))


def _on_node(reader: Reader, place: Place, text: str, local: bool) -> str:
    if text.startswith(("/", "~/")):
        return text
    if local:
        return _here(reader, place, text)
    if reader.good(place):
        message = f"is a path on the node, so it must begin with / or ~/; found `{text}`"
        reader.report(place, f"{dotted(place)} {message}")
    return text


def _existing(reader: Reader, place: Place, text: str) -> str:
    path = _here(reader, place, text)
    if not os.path.exists(path):
        reader.report(place, f"run.files: no file or folder `{path}` on this machine")
    return path


def _checkpoint(reader: Reader, text: str) -> str:
    path = _here(reader, ("train", "resume"), text)
    return path if Path(path).is_file() else text


def written_path(path: Path) -> str:
    """``~/…`` where it lies in the home folder of this machine, which is another one on the hosts."""
    home = os.path.expanduser("~").rstrip("/")
    text = str(path)
    return "~" + text[len(home) :] if home and text.startswith(home + "/") else text
