"""Exports ``cluster_group``, which runs a user's tasks for fabric (an SSH library) on the hosts of a cluster.yml."""

from __future__ import annotations

from gnnfleet.shadow import check_not_shadowed

check_not_shadowed("launcher")

from launcher.transport.tasks import cluster_group  # noqa: E402

__all__ = ["cluster_group"]
