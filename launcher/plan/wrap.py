"""Commands in containers: the key ``wrap`` of a node, with what its program needs to show a run to the container.

A node's supervisor runs in the container, and with it the ranks, the graph server and all other processes of the run.
Programs that the launcher runs on a node (``launcher/node/programs``, ``watch``, ``control``) run outside: they see
the same processes, network and folders, and no package is needed there.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class _Program:
    """How a program that starts containers shows folders and variables of the host; ``{0}`` stands for each of them."""

    subcommand: str = ""  #: word behind which the options belong; '': behind the program itself
    bind: str = ""
    env: str = ""  #: '': the container inherits the environment
    more: tuple[str, ...] = ()  #: further options
    folders: tuple[str, ...] = ()  #: folders for every run that it does not show by itself; /tmp has the leases


_BIND = "--bind={0}:{0}"

#: The supervisor and the programs outside know processes by their pids, and ranks share memory and addresses.
_AS_HOST = ("--rm", "--interactive", "--pid=host", "--network=host", "--ipc=host", "--uts=host")

#: Other words (``conda`` besides ``conda run``, numactl, own scripts) stay as they are.
_PROGRAMS: Mapping[str, _Program] = {
    "apptainer": _Program("exec", _BIND),
    "singularity": _Program("exec", _BIND),
    "ch-run": _Program("", _BIND),
    "podman": _Program("run", "--volume={0}:{0}", "--env={0}", _AS_HOST, ("/tmp",)),
    "docker": _Program("run", "--volume={0}:{0}", "--env={0}", (*_AS_HOST, "--user={ids}"), ("/tmp",)),
    "enroot": _Program("start", "--mount={0}:{0}", "--env={0}", (), ("/tmp",)),
    "conda": _Program("run", more=("--no-capture-output",)),
}


def wrapped(
    wrap: tuple[str, ...], folders: Collection[str] = (), variables: Collection[str] = (), ids: str = ""
) -> tuple[str, ...]:
    """Return the words that come before a command: ``wrap`` with the options that its program needs.

    The options come first, so that those in ``wrap`` override them. ids: ``uid:gid`` of the user on the node; '' if
    unknown.
    """
    place = _options_at(wrap)
    if not place:
        return wrap
    program = _PROGRAMS[place[0]]
    options = [word.format(ids=ids) for word in program.more if ids or "{ids}" not in word]
    if program.bind:
        given = list(filter(None, folders))  # of these, not those that lie in another one
        outermost = [
            one for one in given if not any(one.startswith(other.rstrip("/") + "/") for other in given if other != one)
        ]
        options += [program.bind.format(folder) for folder in dict.fromkeys((*program.folders, *outermost))]
    if program.env:
        options += [program.env.format(name) for name in sorted(variables)]
    return (*wrap[: place[1]], *options, *wrap[place[1] :])


def _options_at(wrap: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the name of the first known program in ``wrap``, and where its options belong; None without one."""
    for index, word in enumerate(wrap):
        program = _PROGRAMS.get(name := posixpath.basename(word))
        if program and not program.subcommand:
            return name, index + 1
        if program and program.subcommand in wrap[index + 1 :]:
            return name, wrap.index(program.subcommand, index + 1) + 1
    return None
