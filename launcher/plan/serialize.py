"""Converts a plan to JSON: the output of ``--dry-run --json``, and the ``run.json`` of a run.

``run.json`` is the plan without ``code`` and the nodes' ``files``; it is the same on every node.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import msgspec

from launcher.command import Command, Secret, is_secret, quote
from launcher.errors import FleetError
from launcher.files import decompress
from launcher.node.json_reader import loads
from launcher.plan.model import LaunchPlan
from trainer.core.typed import convert

_FORMAT, _VERSION = "gnnfleet-run", 3

_MOST = 1 << 28  # maximum bytes of a compressed plan after decompression

_LARGE = 100_000  # characters; larger plans are compressed, as every node gets the whole plan


def to_json(plan: LaunchPlan) -> str:
    """Return the complete plan as indented JSON; secrets, also those in the user's ``env``, are shown as ``***``."""
    values = _builtins(plan)
    for node, shown in zip(plan.nodes, values["nodes"], strict=True):
        for name in ("start", "server", "trainer"):
            command: Command | None = getattr(node, name)
            for secret in (name for name, value in command.env.items() if is_secret(name, value)) if command else ():
                shown[name]["env"][secret] = "***"
                for file in shown["files"]:  # start.sh
                    export = f"export {secret}={quote(command.env[secret])}\n" if command else ""
                    file["content"] = file["content"].replace(export, f"export {secret}=***\n")
    return json.dumps(values, indent=1)


def run_json(plan: LaunchPlan) -> str:
    """Return the text of the ``run.json`` of a plan."""
    head = {"format": _FORMAT, "version": _VERSION, "run_id": plan.run_id}
    values = _builtins(replace(plan, code=(), nodes=tuple(replace(node, files=()) for node in plan.nodes)))
    text = json.dumps({**head, "plan": values})
    if len(text) <= _LARGE:
        return text + "\n"
    packed = base64.b64encode(zlib.compress(json.dumps(values).encode())).decode()
    return json.dumps({**head, "packed": packed}) + "\n"


def read_run(text: str) -> LaunchPlan:
    """Parse the text of a ``run.json``. The returned plan has no ``code``, and its nodes have no ``files``.

    Raises FleetError for a damaged file or an unsupported format version.
    """
    try:
        values = loads(text)
        kind = values.get("format"), values.get("version")
    except (ValueError, AttributeError) as error:
        raise FleetError(f"run.json is damaged: {error}") from None
    if kind != (_FORMAT, _VERSION):
        raise FleetError(f"run.json is of format {kind[0]} version {kind[1]}; this program reads {_FORMAT} {_VERSION}")
    try:
        packed = values.get("packed")
        plan = loads(decompress(base64.b64decode(packed), _MOST), _MOST) if packed else values.get("plan")
        return convert(plan, LaunchPlan)
    except (ValueError, TypeError) as error:
        raise FleetError(f"run.json is damaged: {error}") from None


def _builtins(plan: LaunchPlan) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(plan, enc_hook=_plain)
    return values


def _plain(value: object) -> str:
    # The only type in a plan that msgspec does not know.
    assert isinstance(value, Secret), type(value)
    return str(value)
