"""Runs a user's own fabric tasks on the hosts of a cluster.yml, over the connections that a launch would open.

::

    from gnnfleet.tasks import cluster_group

    with cluster_group("cluster.yml") as group:
        for connection, result in group.run("nvidia-smi -L", hide=True).items():
            print(connection.host, result.stdout)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fabric import ThreadingGroup

from launcher.config.loader import load_config
from launcher.errors import TransportError, UsageError
from launcher.transport import close_all, connect_all
from launcher.transport.ssh import SshTransport


@contextmanager
def cluster_group(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[ThreadingGroup]:
    """Yield a fabric group of the nodes of a cluster.yml, in node_rank order, connected with the logins of a launch.

    Args:
        path: the cluster.yml.
        overrides: values of ``--set``, such as ``"host_keys=accept-new"``.

    The connections are closed at the end of the ``with`` block. Raises ConfigError, TransportError for the first node
    that cannot be reached, UsageError for a node without an SSH connection that fabric can use.
    """
    config = load_config(Path(path), overrides)
    if config.local:
        raise UsageError(f"{path} has `transport: local`, so there are no SSH connections for a fabric group")
    opened = connect_all(config)
    try:
        connections = []
        for k, node in opened.items():
            if isinstance(node, TransportError):
                raise node
            if not isinstance(node, SshTransport) or node.connection is None:
                raise UsageError(f"{node.target} is reached by OpenSSH's own client, which fabric cannot use")
            node.connection.host = config.nodes[k].host
            connections.append(node.connection)
        yield ThreadingGroup.from_connections(connections)
    finally:
        close_all(opened)
