"""The command that goes on from a run, as messages give it: without the hosts that were lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from launcher.plan.build import NodePlan


def excluded_names(nodes: Sequence[NodePlan], away: Collection[int]) -> tuple[str, ...]:
    """What ``--exclude`` takes for those of ``nodes`` whose node_rank is in ``away``: their hosts, or logins where a
    host has other nodes too; () when nobody would be left."""
    others = [node for node in nodes if node.node_rank not in away]
    if not others:
        return ()
    staying, taken = {node.host for node in others}, {node.target for node in others}
    lost = [node for node in nodes if node.node_rank in away]
    names = (node.host if node.host not in staying else node.target for node in lost)
    return tuple(name for name in dict.fromkeys(names) if name not in taken)


def resume_command(run: str, exclude: Collection[str] = ()) -> str:
    """``gnnfleet resume RUN --exclude HOST``."""
    return " ".join([f"gnnfleet resume {run}", *(f"--exclude {name}" for name in exclude)])
