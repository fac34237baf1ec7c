"""Opens a graph from graph servers: on a client node of a run, or from a script (``gnnfleet.connect``)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.core.errors import ServiceError, SettingsError
from trainer.core.ranks import Ranks
from trainer.core.remote_settings import RemoteAccess
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.service.channel import GONE_AFTER
from trainer.service.client import HostClient
from trainer.service.cluster import Cluster
from trainer.service.messages import HelloInfo, ServerAddress
from trainer.service.remote_graph import Gateway, client_name
from trainer.service.service_keys import read_key_file
from trainer.store.client_store import RemoteStore

_HELLO = 10.0  #: seconds that a server may take to answer the first request


def open_client(
    cluster: Cluster, ranks: Ranks, *, key_file: str | Path | None = None, deadline: float = 120.0,
    remote_access: RemoteAccess | None = None, placed: RankLayout | None = None,
) -> Graph:  # fmt: skip
    """Open the graph on a client node of a run. All data comes from graph servers; the home server is asked first.

    Raises:
        ServiceError: No server answers within ``deadline`` seconds, or a server has a different partition.
    """
    remote_access, asker = remote_access or RemoteAccess(), client_name(f"{cluster.run_id}/rank{ranks.rank}")
    home = cluster.home_of(ranks.node_rank)
    others = [place for place in cluster.gateways() if place != home]
    turn = ranks.rank % max(len(others), 1)
    gateway = Gateway(
        [home, *others[turn:], *others[:turn]], deadline, key_file and read_key_file(key_file) or None,
        server_wait=remote_access.server_wait, client=asker, wire_rows=remote_access.wire_rows,
    )  # fmt: skip
    return _open_gateway(gateway, deadline, ranks, placed)


def connect_servers(
    endpoints: str | Sequence[str] | None, key: str | Path | None, ranks: Ranks, *, deadline: float, name: str,
) -> Graph:  # fmt: skip
    keys = None if key is None else read_key_file(Path(os.path.expanduser(key)))
    named = endpoints or (keys.endpoints if keys else ())
    endpoint_list = list(named) if isinstance(named, Sequence) and not isinstance(named, str) else [named]
    if not endpoint_list:
        raise SettingsError(
            "no endpoint to connect to: pass tcp://host:port of a graph server, or a key file that lists endpoints"
            " (gnnfleet serve key NAME -o FILE)"
        )
    for endpoint in endpoint_list:
        address, _, port = str(endpoint).removeprefix("tcp://").rpartition(":")
        if not (str(endpoint).startswith("tcp://") and address and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise SettingsError(f"{endpoint!r} is not an endpoint of a graph server; expected tcp://host:port")
    # The addresses of the servers that answer, then those of the cluster's other servers.
    patience, gone_after = min(deadline, _HELLO), min(GONE_AFTER, deadline)
    unknown = [ServerAddress("", -1, "", endpoint, ()) for endpoint in endpoint_list]
    clients = [HostClient(server, patience, keys, gone_after=gone_after) for server in unknown]
    found: list[tuple[str, HelloInfo]] = []
    problems: list[str] = []
    try:
        # A hello is the first request of a connection; all servers get it at the same time.
        until = time.monotonic() + patience
        for client, hello in [(client, client.greet()) for client in clients]:
            try:
                found.append((client.endpoint, hello.result(max(0.0, until - time.monotonic()))))
            except ServiceError as error:
                problems.append(str(error))
    finally:
        for client in clients:
            client.close()
    if not found:
        kinds = {
            re.sub(r"within [\d.]+ s", "", problem.replace(endpoint, ""))
            for endpoint, problem in zip(endpoint_list, problems, strict=True)
        }
        if len(problems) > 1 and len(kinds) == 1:
            raise ServiceError(f"{problems[0]} Same error at {', '.join(endpoint_list[1:])}")
        raise ServiceError("\n".join(problems))
    met = {info.node_rank for _, info in found}
    places = []
    for endpoint, info in found:
        listed = [place.name for place in info.servers if place.node_rank == info.node_rank]
        server_name = listed[0] if listed else f"node{info.node_rank} ({info.host})"
        places.append(ServerAddress(server_name, info.node_rank, info.host, endpoint, info.part_ids))
    places += [place for place in found[0][1].servers if place.node_rank not in met]
    gateway = Gateway(places, deadline, keys, server_wait=deadline, client=client_name(name))
    return _open_gateway(gateway, deadline, ranks, None)


def _open_gateway(gateway: Gateway, patience: float, ranks: Ranks, placed: RankLayout | None) -> Graph:
    try:
        manifest = gateway.open(patience)
    except Exception:
        gateway.close()
        raise
    store = RemoteStore.of(manifest, gateway, f"the graph served by {gateway.home.name}")
    return Graph(store, gateway, ranks=ranks, placed=placed)
