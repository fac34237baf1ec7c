"""Mode ``verify``: checks that the parts on the nodes are complete and belong to the same partition."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RemoteFileError, SyncError
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.partition import MOST_MANIFEST, PartFile, PartitionFiles, parse_manifest
from launcher.sync.transfer import ask_files, hash_time
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_SHOWN = 12

_WORDS = {
    "missing": "is missing",
    "partial": "is missing (its folder has an unfinished transfer)",
    "different": "differs from the manifest",
}


class PartsDiffer(SyncError):
    """Files of the parts are missing or differ from the manifest. ``by_node[node_rank]``: one line of text per file."""

    code = "parts-differ"

    REMEDY = (
        "Copy these files to the nodes again, or delete them and make the partition again with the same options; "
        "then launch again"
    )

    def __init__(self, labels: Mapping[int, str], by_node: Mapping[int, Sequence[str]]):
        self.by_node = by_node
        lines = [f"{labels[k]}: {text}" for k in sorted(by_node) for text in by_node[k]]
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        super().__init__("\n".join([*lines[:_SHOWN], *more, self.REMEDY]))


@dataclass(frozen=True)
class _VerifyReport:
    """Result of ``verify`` if all nodes have the same manifest and all files that the plan needs."""

    manifest: PartitionFiles
    files: int  #: number of files checked on all nodes
    bytes: int  #: their size

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint


def verify(plan: LaunchPlan, transports: Mapping[int, Transport]) -> _VerifyReport:
    """Check digests of the parts on all nodes in parallel. Raises SyncError, which names each node, host and file."""
    nodes = {node.node_rank: node for node in plan.nodes if node.parts}
    raw = on_nodes(nodes, lambda k: _read_manifest(nodes[k], transports[k])).or_raise()
    missing = [node for k, node in nodes.items() if raw[k] is None]
    if len(missing) == len(nodes):
        raise SyncError(
            f"no node has a manifest.json in {missing[0].data_dir}. With data.mode verify a launch does not partition "
            "the graph: run `gnnfleet partition make --config FILE` on a machine where that folder is mounted, "
            "or use data.mode sync"
        )
    if missing:
        lines = [f"{node.label}: no {node.data_dir}/manifest.json" for node in missing]
        raise SyncError(
            "\n".join([*lines, "Mount the folder on these nodes, or set `data_folder` of each to its path"])
        )
    manifests = {}
    for k, text in raw.items():
        try:
            manifests[k] = parse_manifest(text or b"", nodes[k].data_dir)
        except ValueError as error:
            raise SyncError(
                f"{nodes[k].label}: {nodes[k].data_dir}/manifest.json is not usable ({error}); make the partition again"
            ) from error

    # All nodes have the same manifest.
    first, *others = nodes.values()
    common = manifests[first.node_rank]
    if common.num_parts != plan.num_parts:
        raise SyncError(
            f"{first.label}: {first.data_dir} has {common.num_parts} parts, but the config needs "
            f"{plan.num_parts}; set data.num_parts, or make the partition again"
        )
    for node in others:
        if manifests[node.node_rank].files[-1].sha256 != common.files[-1].sha256:
            raise SyncError(
                f"{node.label}: {node.data_dir}/manifest.json differs from {first.data_dir}/manifest.json on "
                f"{first.label}; all nodes must have parts of the same partition"
            )

    replicated = plan.topology.replicated
    wanted = {k: manifest.of_parts(nodes[k].parts, replicated=replicated) for k, manifest in manifests.items()}
    answers = on_nodes(nodes, lambda k: _wrong_files(nodes[k], transports[k], wanted[k])).or_raise()
    if wrong := {k: texts for k, texts in answers.items() if texts}:
        raise PartsDiffer({k: nodes[k].label for k in wrong}, wrong)
    files = [file for k in wanted for file in wanted[k]]
    return _VerifyReport(manifests[min(manifests)], len(files), sum(file.bytes for file in files))


def _read_manifest(node: NodePlan, transport: Transport) -> bytes | None:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "manifest.json"
        try:
            transport.download(f"{node.data_dir}/manifest.json", local, most=MOST_MANIFEST + 1)
        except RemoteFileError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return local.read_bytes()


def _wrong_files(node: NodePlan, transport: Transport, files: tuple[PartFile, ...]) -> list[str]:
    entries: list[dict[str, Any]] = [
        {"path": f"{node.data_dir}/{file.path}", "bytes": file.bytes, "sha256": file.sha256} for file in files
    ]
    request = {"op": "inventory", "files": entries, "folders": []}
    found = ask_files(transport, node, request, hash_time(files))["files"]
    # The number of files of each part folder with two or more files that are all missing.
    states: dict[str, list[str]] = {}
    for state in found:
        states.setdefault(_top(state, node.data_dir), []).append(state["state"])
    gone = {top: len(all_of) for top, all_of in states.items() if len(all_of) > 1 and set(all_of) == {"missing"}}
    lines = [f"{folder} is missing, with all its {count} files" for folder, count in gone.items()]
    wrong = [state for state in found if state["state"] != "present" and _top(state, node.data_dir) not in gone]
    return lines + [f"{state['path']} {state['error'] or _WORDS[state['state']]}" for state in wrong]


def _top(state: Mapping[str, Any], data_dir: str) -> str:
    """Return the part folder, such as ``<data_dir>/part1``, that contains the file of ``state``."""
    return f"{data_dir}/{state['path'].removeprefix(f'{data_dir}/').partition('/')[0]}"
