"""The table of the nodes of a plan: a line for each node or, in a large cluster, for consecutive similar nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.filesize import decimal
from rich.text import Text

from launcher.config.schema import login_text
from launcher.hostlist import fold
from launcher.plan.model import LaunchPlan, NodePlan, PlannedFile
from launcher.text import count, spans

LARGE = 24  #: from this number of nodes on, the table has a line for each group of nodes

MOST_RANGES = 6  #: ranges in a list of nodes or hosts

_MOST_ROWS = 16  # lines of the table of a large cluster


def placement_lines(plan: LaunchPlan) -> list[Text]:
    """Return a table with a line for each node: target, ranks, devices, parts, address, files.

    If nodes have other roles than worker, or parts have several holders, the table also shows role, copies, bytes of
    parts and home server. In a large cluster each line is about consecutive nodes of the same kind.
    """
    roles = any(node.role != "worker" or node.copies for node in plan.nodes)
    extra = ("role", "copies", "part data", "asks first") if roles else ("", "", "", "")
    titles = ("node", "target", extra[0], "ranks", "devices", "parts", *extra[1:], "address", "files")
    groups = _similar(plan.nodes) if len(plan.nodes) >= LARGE else [[node] for node in plan.nodes]
    cut = groups[: _MOST_ROWS if len(groups) > _MOST_ROWS and len(plan.nodes) >= LARGE else len(groups)]
    lines = [titles, *(_placed(plan, group) for group in cut)]
    columns = [column for column in zip(*lines, strict=True) if column[0] and {*column[1:]} != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    rows = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]
    more = sum(map(len, groups[len(cut) :]))
    rest = [Text(f"  … {count(more, 'more node')}: --verbose or --json", "dim")] if more else []
    return [Text(rows[0], "dim"), *map(Text, rows[1:]), *rest]


def _similar(nodes: Sequence[NodePlan]) -> list[list[NodePlan]]:
    """Split ``nodes`` into groups of consecutive nodes with equal role, devices and numbers of ranks and parts."""

    def kind(node: NodePlan) -> tuple[object, ...]:
        return node.role, node.devices, len(node.ranks), len(node.parts), len(node.copies), node.server is None

    return [list(group) for _, group in itertools.groupby(nodes, kind)]


def _placed(plan: LaunchPlan, nodes: Sequence[NodePlan]) -> tuple[str, ...]:
    """Return the cells of the line of ``nodes``, which are similar."""
    names = fold((f"node{node.node_rank}" for node in nodes), MOST_RANGES)
    targets = fold((node.target for node in nodes), MOST_RANGES)
    devices = devices_text(nodes[0]) if nodes[0].ranks else "-"
    first = sorted({part for node in nodes for part in {*node.parts} - {*node.copies}})
    copies = sorted({part for node in nodes for part in node.copies})
    ranks = [rank for node in nodes for rank in node.ranks]
    share = (nodes[0].role, span_text(ranks), devices, span_text(first), span_text(copies))
    sizes = _sizes([_bytes_of_parts(node) for node in nodes]), _sizes([plan.sent_bytes(node) for node in nodes])
    homes = fold(dict.fromkeys(node.home for node in nodes), MOST_RANGES)
    return (names, targets, *share, sizes[0], homes or "-", _addresses(nodes), sizes[1])


def _addresses(nodes: Sequence[NodePlan]) -> str:
    """Return ``10.0.0.1:29600`` for one node; for several ``10.0.0.[1-64]:29600-29663``."""
    ports = sorted({node.service_port for node in nodes if node.server})
    if len(nodes) == 1:
        return login_text(None, nodes[0].address, ports[0] if ports else None)
    addresses = fold((node.address for node in nodes), MOST_RANGES)
    return f"{addresses}:{ports[0]}-{ports[-1]}" if len(ports) > 1 else ":".join([addresses, *map(str, ports)])


def _sizes(numbers: Sequence[int]) -> str:
    """Return bytes as text, as ``1.2 MB``, or ``1.2 MB to 3.4 GB`` if nodes differ; ``-`` for none."""
    texts = [decimal(number) if number else "-" for number in (min(numbers), max(numbers))]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _bytes_of_parts(node: NodePlan) -> int:
    """Return the bytes of the part files that are sent to the node; 0 if unknown or none."""
    top = f"{node.data_dir}/part"
    return total_bytes([file for file in node.files if node.parts and file.dest.startswith(top)])


def total_bytes(files: Sequence[PlannedFile]) -> int:
    return sum(file.bytes for file in files)


def devices_text(node: NodePlan) -> str:
    return ",".join(map(str, node.devices)) or "CPU"


def span_text(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as ``0-3`` and ``0,3-4``; ``-`` for none."""
    return spans(numbers).replace("–", "-").replace(" ", "") or "-"
