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

from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import NodeConfig
from launcher.errors import FleetError, SessionError
from launcher.plan.model import NodePlan
from launcher.report.run_folder import FoundRun

_PER_WINDOW = 16

_WIDTH, _HEIGHT = 240, 120  # of a session nobody has attached to yet; its clients' own size counts later

#: $1 label; the rest attaches. The pane stays, and says so, when that ends or never could begin.
_PANE = """
label=$1; shift
while :; do
  "$@"
  printf '\\n%s: not attached (the run has ended there, or the line is closed); Enter tries again\\n' "$label"
  read -r _ || exec sleep infinity
done
"""


@dataclass(frozen=True)
class Pane:
    """What one pane shows."""

    label: str
    argv: tuple[str, ...]  #: attaches to the node's session

    @property
    def command(self) -> str:
        """As a shell takes it, to paste."""
        return shlex.join(self.argv)


def panes_of(found: FoundRun) -> list[Pane]:
    """One for each node, in order."""
    config = found.needed_config
    nodes = found.needed_plan.nodes
    return [Pane(node.label, attach_argv(config, node)) for node in nodes]


def attach_argv(config: ResolvedConfig, node: NodePlan) -> tuple[str, ...]:
    """What a person types to see a node's session; read-only, as keys typed there would reach the supervisor."""
    attach = ("tmux", "attach", "-r", "-t", f"={node.session}")
    if config.transport == "local":
        return ("env", "TMUX=", *attach)
    return (*_ssh(config.nodes[node.node_rank]), shlex.join(attach))


def _ssh(node: NodeConfig) -> tuple[str, ...]:
    words = ["ssh", "-t"]
    words += ["-p", str(node.port)] if node.port else []
    words += ["-i", node.key] if node.key else []
    return (*words, f"{node.user}@{node.host}" if node.user else node.host)


def session_of(run_id: str) -> str:
    """Of the local session."""
    return "gnnfleet-" + re.sub(r"[^A-Za-z0-9_-]", "-", run_id)


def make_session(run_id: str, panes: Sequence[Pane]) -> str:
    """The local session with its panes, made unless it is there already; its name. Raises SessionError."""
    name = session_of(run_id)
    server = libtmux.Server()
    try:
        if server.has_session(name, exact=True):
            return name
        session = server.new_session(name, window_command=_pane_command(panes[0]), x=_WIDTH, y=_HEIGHT)
        for start in range(0, len(panes), _PER_WINDOW):
            group = panes[start : start + _PER_WINDOW]
            first = start == 0
            window = session.windows[0] if first else session.new_window(window_shell=_pane_command(group[0]))
            _fill(window, group)
        session.windows[0].select()
    except libtmux.exc.TmuxCommandNotFound:
        raise SessionError("tmux is not installed on this machine; install it (apt install tmux)") from None
    except libtmux.exc.LibTmuxException as error:
        raise SessionError(f"tmux could not make session {name}: {error}") from None
    return name


def _fill(window: libtmux.Window, group: Sequence[Pane]) -> None:
    """The other panes of a window, tiled; each border says which node it is."""
    window.rename_window(group[0].label.split()[0] if len(group) == 1 else "nodes")
    for option, value in {"synchronize-panes": "off", "pane-border-status": "top", "remain-on-exit": "on"}.items():
        window.set_option(option, value)
    window.set_option("pane-border-format", " #{@gnnfleet_node} ")
    made = [window.panes[0]]
    for pane in group[1:]:
        made.append(made[-1].split(direction=PaneDirection.Below, shell=_pane_command(pane), attach=False))
        window.select_layout("tiled")
    for one, pane in zip(made, group, strict=True):
        one.cmd("set-option", "-p", "@gnnfleet_node", pane.label)  # a title would be overwritten by the node's tmux
        one.cmd("select-pane", "-T", pane.label)
    made[0].select()


def _pane_command(pane: Pane) -> str:
    return shlex.join(["bash", "-c", _PANE, "bash", pane.label, *pane.argv])


def enter(name: str) -> int:
    """Attach this terminal to the session, or switch there from inside tmux; tmux's exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # tmux gives the terminal back; it must not be killed for us
    verb = "switch-client" if os.environ.get("TMUX") else "attach-session"
    try:
        return subprocess.run(["tmux", verb, "-t", f"={name}"], check=False).returncode
    except FileNotFoundError:
        raise FleetError("tmux is not installed on this machine; install it (apt install tmux)") from None
