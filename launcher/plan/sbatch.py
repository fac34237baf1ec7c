"""Renders the batch script of a Slurm job that launches a run on the nodes of its allocation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError

_NAME = re.compile(r"[a-z][a-z0-9-]*")

_ON, _OFF = ("", "true", "yes", "on"), ("false", "no", "off")

_WARNING = 120  # seconds before the time limit at which Slurm sends SIGUSR1; it may come up to a minute earlier

_LEAST_WARNING = 10

_OURS = ("nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode", "signal", "wrap")

_TEXT = """\
#!/bin/bash
# Run {run_id}: launches it on the nodes of this job. If the job is requeued, the run resumes as {run_id}-r1, -r2 …
{options}

cd {cwd}
exec {command}
"""


def sbatch_script(
    config: ClusterConfig, *, run_id: str, command: Sequence[str], cwd: Path, log: Path, job_name: str = ""
) -> str:
    """Return the text of a batch script that runs ``command``, a launch with ``transport: slurm``, in ``cwd``.

    The options of sbatch are those in ``config.slurm``; nodes, output and the warning before the time limit are added.
    ``log``: file for the output, on the file system that all nodes share. Raises UsageError for an invalid option.
    """
    options = {"job-name": job_name or config.name, **_checked(config.slurm)}
    options |= {"nodes": str(len(config.nodes)), "ntasks-per-node": "1"}
    options |= {"output": str(log), "open-mode": "append", "signal": f"B:USR1@{warning_seconds(config.slurm)}"}
    if config.run.restarts:
        options["no-kill"] = "true"  # the run goes on without a node that is lost
    lines = [_line(name, text) for name, text in options.items() if text.lower() not in _OFF]
    return _TEXT.format(run_id=run_id, options="\n".join(lines), cwd=shlex.quote(str(cwd)), command=shlex.join(command))


def is_on(options: Mapping[str, str], name: str) -> bool:
    """Whether the sbatch options have the flag ``name``, such as ``requeue: true``."""
    return name in options and options[name].lower() not in _OFF


def warning_seconds(options: Mapping[str, str]) -> int:
    """Return how many seconds before its time limit the job is warned: 120, or about a tenth of a short limit."""
    limit = _seconds(options.get("time", ""))
    return _WARNING if limit is None else max(_LEAST_WARNING, min(_WARNING, limit // 10))


def _seconds(text: str) -> int | None:
    """Convert a time limit such as ``90`` (minutes), ``90:30`` or ``1-12:00:00`` to seconds; None if it is invalid."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", text)
    if match is None:
        return None
    days, first, second, third = (int(word or 0) for word in match.groups())
    if match[1]:
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if match[4] else first * 60 + second


def _checked(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the user except ``nodes``.

    Raises UsageError for a name that is not a long option of sbatch, and for an option that gnnfleet sets itself.
    """
    found = {}
    for name, text in options.items():
        plain = name.replace("_", "-")
        if not _NAME.fullmatch(plain) or "\n" in text:
            raise UsageError(f"slurm: `{name}` is not a long option of sbatch, such as partition or gpus-per-node")
        if plain in _OURS[1:]:
            raise UsageError(f"slurm: {plain} is set by gnnfleet for its job; leave it out")
        if plain != "nodes":
            found[plain] = text
    return found


def _line(name: str, text: str) -> str:
    value = "" if text.lower() in _ON else f"={_quoted(text)}"
    return f"#SBATCH --{name}{value}"


def _quoted(text: str) -> str:
    """Quote a value for an ``#SBATCH`` line if needed.

    A value with a double quote is returned unchanged, because such a line has no escape for it.
    """
    return f'"{text}"' if re.search(r"[\s#;']", text) and '"' not in text else text
