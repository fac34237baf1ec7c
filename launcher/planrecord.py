"""``plan.json`` of a run folder: the plan as it was carried out, to be looked at later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from launcher.plan import LaunchPlan, NodePlan, to_json
from launcher.planned import PlannedFile


def plan_record(plan: LaunchPlan) -> str:
    """``plan`` as ``--dry-run --json`` shows it, but what nodes share is written once, as a thousand of them repeat
    hundreds of megabytes: ``code``, the files below every node's ``code_dir``, and ``contents``, texts by digest."""
    whole = max(plan.nodes, key=lambda node: len(node.files))  # servers that go on are sent little
    code = [replace(file, dest=dest) for dest, file in _code_of(whole)]
    nodes = tuple(replace(node, files=tuple(map(_without_text, _own_files(node)))) for node in plan.nodes)
    texts = {file.sha256: file.content for node in plan.nodes for file in _own_files(node) if _is_shared(file)}
    values: dict[str, Any] = json.loads(to_json(replace(plan, nodes=nodes)))
    shared = json.loads(to_json(replace(plan, nodes=(replace(plan.nodes[0], files=tuple(code)),))))
    return json.dumps({**values, "code": shared["nodes"][0]["files"], "contents": texts}, indent=1) + "\n"


def _code_of(node: NodePlan) -> Iterator[tuple[str, PlannedFile]]:
    top = f"{node.code_dir}/"
    return ((file.dest.removeprefix(top), file) for file in node.files if file.dest.startswith(top))


def _own_files(node: NodePlan) -> Iterable[PlannedFile]:
    return (file for file in node.files if not file.dest.startswith(f"{node.code_dir}/"))


def _is_shared(file: PlannedFile) -> bool:
    return bool(file.content) and not file.secret


def _without_text(file: PlannedFile) -> PlannedFile:
    return replace(file, content="") if _is_shared(file) else file
