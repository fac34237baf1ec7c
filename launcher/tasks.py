"""Tasks of one's own on a cluster's hosts, in fabric's terms, over the lines that a launch would open.

::

    from launcher.tasks import cluster_group

    with cluster_group("cluster.yml") as group:
        for connection, result in group.run("nvidia-smi -L", hide=True).items():
            print(connection.host, result.stdout)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fabric import Config, Connection, ThreadingGroup

from launcher.config.loader import load_config
from launcher.config.schema import ClusterConfig
from launcher.errors import TransportError, UsageError
from launcher.transport import Transport, close_all, connect_all
from launcher.transport.choice import NodeOverSsh


@contextmanager
def cluster_group(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[ThreadingGroup]:
    """A fabric group of the nodes of a cluster.yml, in node_rank order, logged in as a launch logs in.

    ``overrides`` are as ``--set``. Raises ConfigError, TransportError for the first node that cannot be
    reached, UsageError where there is no SSH connection that fabric could use. Closed at the end.
    """
    config = load_config(Path(path), overrides)
    if config.transport == "local":
        raise UsageError(f"{path} has `transport: local`: there is no SSH connection to make a fabric group of")
    lines = connect_all(config)
    try:
        yield ThreadingGroup.from_connections(_connection(config, k, line) for k, line in lines.items())
    finally:
        close_all(lines)


def _connection(config: ClusterConfig, node_rank: int, line: Transport | TransportError) -> Connection:
    """The node as a fabric Connection that is open already."""
    if isinstance(line, TransportError):
        raise line
    assert isinstance(line, NodeOverSsh)
    opened = line.paramiko_transport
    if opened is None:
        raise UsageError(f"{line.target} is reached by OpenSSH's own client, which fabric cannot use")
    fabric_config = Config(lazy=True, overrides={"run": {"in_stream": False}})  # our stdin is for none of many hosts
    connection = Connection(config.nodes[node_rank].host, user=opened.get_username(), config=fabric_config)
    connection.transport = opened
    connection.client._transport = opened  # where paramiko's client keeps what its connect() makes
    return connection
