"""Run one of our standard-library programs on a node before any of our code is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.errors import NodeCallError
from launcher.script import Command
from launcher.transport.base import Completed, Transport

MARKER = "gnnfleet-reply:"  # so that output of profiles and setup lines does no harm
OLDEST = (3, 8)

# stdin is "<length of source>\n<source><request as JSON>"; the source defines main(request) -> reply
BOOT = f"""
import sys, json
if sys.version_info < {OLDEST}: sys.exit("python %d.%d is too old" % sys.version_info[:2])
data = sys.stdin.buffer
source = data.read(int(data.readline())).decode()
program = {{"__name__": "gnnfleet_node"}}
exec(compile(source, "<gnnfleet>", "exec"), program)
reply = program["main"](json.loads(data.read().decode()))
sys.stdout.write("\\n{MARKER}" + json.dumps(reply) + "\\n")
""".strip()

_PROGRAMS = Path(__file__).parent / "node"


def program_source(name: str) -> str:
    """Source of ``launcher/node/<name>.py``."""
    return (_PROGRAMS / f"{name}.py").read_text()


def call(transport: Transport, python: Command, program: str, request: dict[str, Any], timeout: float) -> Any:
    """Run node program ``program`` (its source) with ``request``; returns its reply.

    ``python`` is the interpreter as an argv prefix with its setup lines, as made by
    ``launcher.placement.interpreter``. Raises ``TransportError`` and ``NodeCallError``.
    """
    command = Command((*python.argv, "-c", BOOT), env=python.env, cwd=python.cwd, setup=python.setup)
    done = transport.run(command, stdin=join_request(program, request), timeout=timeout)
    return parse_reply(done, python.argv[0], transport)


def join_request(program: str, request: dict[str, Any]) -> bytes:
    """What ``BOOT`` reads from stdin."""
    source = program.encode()
    return b"%d\n%s%s" % (len(source), source, json.dumps(request).encode())


def split_request(stdin: bytes) -> tuple[str, dict[str, Any]]:
    """The inverse of ``join_request``: (program, request)."""
    length, _, rest = stdin.partition(b"\n")
    return rest[: int(length)].decode(), json.loads(rest[int(length) :])


def parse_reply(done: Completed, python: str, transport: Transport) -> Any:
    """The reply in what a call printed; raises ``NodeCallError``."""
    found = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.startswith(MARKER)]
    if done.returncode == 0 and found:
        return json.loads(found[-1][len(MARKER) :])
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    where: dict[str, Any] = {"host": transport.target, "node_rank": transport.node_rank}
    if done.returncode in (126, 127):
        why = said[-1] if said else "not found"
        remedy = "set `python`, `venv` or `conda` of this node"
        raise NodeCallError(f"cannot run {python} ({why})", remedy=remedy, **where)
    last = "\n    ".join(said[-5:]) or "it printed nothing"
    raise NodeCallError(f"{python} ended with status {done.returncode}:\n    {last}", **where)
