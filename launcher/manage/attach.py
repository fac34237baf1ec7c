"""``gnnfleet attach``: a local tmux session with one pane per node, each attached to that node's session."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import libtmux.exc
from libtmux.constants import PaneDirection

from launcher.command import Command, shell_line
from launcher.config.resolve import ResolvedConfig
from launcher.errors import FleetError, SessionError, UsageError
from launcher.plan.model import NodePlan
from launcher.report.run_folder import FoundRun

_PER_WINDOW = 16

_WIDTH, _HEIGHT = 240, 120  # size of the session until a terminal attaches; then tmux uses that terminal's size

#: Command of a pane. $1: label, $2…: command that attaches. When that command ends, the pane stays and Enter retries.
_PANE = """
label=$1; shift
while :; do
  "$@"
  printf '\\n%s: not attached (the run has ended there, or the connection was lost); press Enter to retry\\n' "$label"
  read -r _ || exec sleep infinity
done
"""


@dataclass(frozen=True)
class Pane:
    """One pane of the local tmux session, attached to the tmux session of one node."""

    label: str
    argv: tuple[str, ...]  #: command that attaches to the node's session

    @property
    def command(self) -> str:
        # zsh would take a plain `=name` for the path of a program
        return " ".join(f"'{word}'" if word.startswith("=") else shlex.quote(word) for word in self.argv)


def panes_of(found: FoundRun) -> list[Pane]:
    """Return one pane for each node, in order of node_rank. Raises UsageError for a run in a Slurm job."""
    config = found.needed_config
    nodes = found.needed_plan.nodes
    if any(node.slurm_job for node in nodes):
        raise UsageError(
            f"run {found.run_id} is in a Slurm job and has no tmux sessions; see its output with "
            f"`gnnfleet logs {found.words} -f`"
        )
    return [Pane(node.label, attach_argv(config, node)) for node in nodes]


def attach_argv(config: ResolvedConfig, node: NodePlan) -> tuple[str, ...]:
    """Return the command that attaches to the tmux session of a node, read-only."""
    if config.local:
        return ("env", "TMUX=", "tmux", "attach", "-r", "-t", f"={node.session}")
    login = config.nodes[node.node_rank]
    words = ["-p", str(login.port)] if login.port else []
    words += ["-i", login.key] if login.key else []
    target = f"{login.user}@{login.host}" if login.user else login.host
    return ("ssh", "-t", *words, target, f"tmux attach -r -t '={node.session}'")


def make_session(run_id: str, panes: Sequence[Pane]) -> str:
    """Create the local tmux session unless it exists; return its name. Raises SessionError."""
    name = "gnnfleet-" + re.sub(r"[^A-Za-z0-9_-]", "-", run_id)
    server = libtmux.Server()
    try:
        if server.has_session(name, exact=True):
            return name
        session = server.new_session(name, window_command=_pane_command(panes[0]), x=_WIDTH, y=_HEIGHT)
        for start in range(0, len(panes), _PER_WINDOW):
            group = panes[start : start + _PER_WINDOW]
            first = start == 0
            window = session.windows[0] if first else session.new_window(window_shell=_pane_command(group[0]))
            # Split a window into tiled panes, one for each item of ``group``. The first pane exists already.
            window.rename_window(group[0].label.split()[0] if len(group) == 1 else "nodes")
            for option, value in {
                "synchronize-panes": "off",
                "pane-border-status": "top",
                "remain-on-exit": "on",
            }.items():
                window.set_option(option, value)
            window.set_option("pane-border-format", " #{@gnnfleet_node} ")
            tmux_panes = [window.panes[0]]
            for pane in group[1:]:
                tmux_panes.append(
                    tmux_panes[-1].split(direction=PaneDirection.Below, shell=_pane_command(pane), attach=False)
                )
                window.select_layout("tiled")
            for tmux_pane, pane in zip(tmux_panes, group, strict=True):
                tmux_pane.cmd("set-option", "-p", "@gnnfleet_node", pane.label)  # the node's tmux overwrites the title
                tmux_pane.cmd("select-pane", "-T", pane.label)
            tmux_panes[0].select()
        session.windows[0].select()
    except libtmux.exc.TmuxCommandNotFound:
        raise SessionError("tmux is not installed on this machine; install it (apt install tmux)") from None
    except libtmux.exc.LibTmuxException as error:
        raise SessionError(f"tmux could not create session {name}: {error}") from None
    return name


def _pane_command(pane: Pane) -> str:
    return shell_line(Command(("bash", "-c", _PANE, "bash", pane.label, *pane.argv)))


def enter(name: str) -> int:
    """Attach this terminal to the local tmux session ``name``; return the exit status of tmux."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # tmux restores the terminal itself
    verb = "switch-client" if os.environ.get("TMUX") else "attach-session"
    try:
        return subprocess.run(["tmux", verb, "-t", f"={name}"], check=False).returncode
    except FileNotFoundError:
        raise FleetError("tmux is not installed on this machine; install it (apt install tmux)") from None
