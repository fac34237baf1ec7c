"""Options of sbatch, and the batch script of a Slurm job that launches a run on the nodes of its allocation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.hostlist import split_list
from trainer.core.fields import LINE

_NAME = re.compile(r"[a-z][a-z0-9-]*")

_ON, _OFF = ("", "true", "yes", "on"), ("false", "no", "off")

_WARNING = 120  # seconds before the time limit at which Slurm sends SIGUSR1; it may come up to a minute earlier

_LEAST_WARNING = 10

#: Options of sbatch without a value.
_FLAGS = (
    *("contiguous", "exclusive", "get-user-env", "hold", "ignore-pbs", "no-kill", "no-requeue", "overcommit"),
    *("oversubscribe", "quiet", "reboot", "requeue", "spread-job", "use-min-nodes", "verbose"),
)

_OURS = ("ntasks", "ntasks-per-node", "output", "error", "open-mode", "signal", "wrap")

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
    given = normalized(config.slurm)
    if ours := [name for name in given if name in _OURS]:
        raise UsageError(f"slurm: {ours[0]} is set by gnnfleet for its job; leave it out")
    options = {"job-name": job_name or config.name, **given}
    options |= {"nodes": str(len(config.nodes)), "ntasks-per-node": "1"}
    options |= {"output": str(log), "open-mode": "append", "signal": f"B:USR1@{warning_seconds(config.slurm)}"}
    if config.run.restarts:
        options["no-kill"] = "true"  # the run goes on without a node that is lost
    lines = "\n".join(option_lines(options))
    return _TEXT.format(run_id=run_id, options=lines, cwd=shlex.quote(str(cwd)), command=shlex.join(command))


def parse_options(text: str) -> dict[str, str]:
    """Return the options of sbatch in ``partition=gpu,time=2:00:00,requeue``; a flag has the value ``true``.

    Commas in brackets do not separate, nor do those in values, as in ``exclude=gnn1,gnn2``. Raises UsageError for an
    option without a name.
    """
    found: dict[str, str] = {}
    last = ""  # option with a value that the word before belongs to
    for word in split_list(text):
        name, equals, value = word.partition("=")
        if not equals and name not in _FLAGS and last:
            found[last] += f",{word}"
        elif not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
            raise UsageError(f"--slurm {word}: give long options of sbatch without --, such as partition=gpu,nodes=4")
        elif not equals and name not in _FLAGS:
            raise UsageError(f"--slurm {word}: give its value, or {word}=true if it is an option without one")
        else:
            found[name] = value if equals else "true"
            last = name if equals else ""
    return found


def option_lines(options: Mapping[str, str]) -> list[str]:
    """Return the ``#SBATCH`` lines of a batch script.

    An option with the value '', true, yes or on is a flag; one with false, no or off is left out.
    """
    lines = []
    for name, text in options.items():
        if text.lower() in _ON:
            lines.append(f"#SBATCH --{name}")
        elif text.lower() not in _OFF:
            # There, as sbatch reads it, \ escapes the next character.
            quoted = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"' if re.search(r"""[\s#;'"\\]""", text) else text
            lines.append(f"#SBATCH --{name}={quoted}")
    return lines


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


def normalized(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the section ``slurm``, except ``nodes``, with ``-`` for each ``_`` in their names.

    Raises UsageError for a name that is not a long option of sbatch, and for a value with control characters.
    """
    found = {name.replace("_", "-"): text for name, text in options.items()}
    for name, (plain, text) in zip(options, found.items(), strict=True):
        if not _NAME.fullmatch(plain) or not re.fullmatch(LINE.pattern, text):
            what = "its value has several lines" if _NAME.fullmatch(plain) else "it is not a long option of sbatch"
            raise UsageError(f"slurm: `{name}`: {what}; give options such as partition or gpus-per-node")
    found.pop("nodes", None)
    return found
