"""``Finding``: the result of one check on one node."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from launcher.config.schema import ClusterConfig
from launcher.errors import NodeCallError, NodeError, node_label


def connect_finding(config: ClusterConfig, node_rank: int, error: Exception) -> Finding:
    """Return the finding for a node that cannot be reached, or whose Python fails."""
    what, remedy, code = str(error), "", ""
    if isinstance(error, NodeError):
        what, remedy, code = error.message, error.remedy, error.code
    check = ("container" if code == "container" else "python") if isinstance(error, NodeCallError) else "connect"
    return Finding(node_rank, config.nodes[node_rank].host, "block", check, what, remedy, code=code)


Severity = Literal["ok", "warn", "block"]


@dataclass(frozen=True)
class Finding:
    """The result of one check on one node."""

    node_rank: int
    host: str
    severity: Severity
    check: str
    message: str
    remedy: str = ""  #: what the user can do, as text
    command: str = ""  #: shell command that fixes it when run on the node
    login: tuple[str, ...] = ()  #: argv that logs in to the node, as ("ssh", "alice@gnn2"); () for transport ``local``
    code: str = ""  #: of its explanation (``gnnfleet explain CODE``)
    held_by: str = ""  #: the run that uses what is needed, or waits for it: a launch with --wait waits for that run

    def line(self) -> str:
        """Return the finding as one line of text: node, message, remedy and command."""
        remedy = "; ".join(filter(None, [self.remedy, self.paste() and f"`{self.paste()}`"]))
        return f"{node_label(self.node_rank, self.host)}: {self.message}" + (f" – {remedy}" if remedy else "")

    def paste(self) -> str:
        """Return a shell line that runs ``command`` on the node, over SSH if needed; '' without ``command``."""
        if not self.command or not self.login:
            return self.command
        return f"{shlex.join(self.login)} {shlex.quote(self.command)}"
