"""Opening a graph that graph servers hold: as a client node of a run, or from a notebook."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.core.errors import ServiceError, SettingsError
from trainer.core.ranks import Ranks
from trainer.core.remote_access import Reach
from trainer.loader.open import Graph
from trainer.loader.seed_order import RankLayout
from trainer.service.channel import GONE_AFTER
from trainer.service.client import HostClient
from trainer.service.cluster import Cluster
from trainer.service.curve_keys import CurveKeys, read_key_file
from trainer.service.messages import HelloInfo
from trainer.service.places import ServerPlace
from trainer.service.remote_graph import Gateway, client_name
from trainer.store.remote_store import RemoteStore

_HELLO = 10.0  #: seconds a server may take to say who it is


def open_client(
    cluster: Cluster, ranks: Ranks, *, key_file: str | Path | None = None, deadline: float = 120.0,
    reach: Reach | None = None, placed: RankLayout | None = None,
) -> Graph:  # fmt: skip
    """The graph as a client node of a run has it: all of it through the servers, home first.

    Raises ``ServiceError`` when no server answers within ``deadline``, or another partition is served there.
    """
    reach, asker = reach or Reach(), client_name(f"{cluster.run_id}/rank{ranks.rank}")
    home = cluster.home_of(ranks.node_rank)
    others = [place for place in cluster.gateways() if place != home]
    turn = ranks.rank % max(len(others), 1)
    gateway = Gateway(
        [home, *others[turn:], *others[:turn]], deadline, key_file and read_key_file(key_file) or None,
        server_wait=reach.server_wait, client=asker, wire_rows=reach.wire_rows,
    )  # fmt: skip
    return _opened(gateway, deadline, ranks, placed)


def connect_servers(
    endpoints: str | Sequence[str] | None, key: str | Path | None, ranks: Ranks, *, deadline: float, name: str,
) -> Graph:  # fmt: skip
    """``trainer.connect``: see there."""
    keys = None if key is None else read_key_file(Path(key).expanduser())
    named = endpoints or (keys.endpoints if keys else ())
    given = list(named) if isinstance(named, Sequence) and not isinstance(named, str) else [named]
    if not given:
        raise SettingsError(
            "no endpoint to connect to: give tcp://host:port of a graph server, or a key file that names some"
            " (gnnfleet serve key NAME -o FILE)"
        )
    for endpoint in given:
        _check_endpoint(endpoint)
    gateway = Gateway(
        _places(given, keys, deadline), deadline, keys, server_wait=deadline, client=client_name(name),
    )  # fmt: skip
    return _opened(gateway, deadline, ranks, None)


def _opened(gateway: Gateway, patience: float, ranks: Ranks, placed: RankLayout | None) -> Graph:
    try:
        manifest = gateway.open(patience)
    except Exception:
        gateway.close()
        raise
    store = RemoteStore.of(manifest, gateway, f"the graph served by {gateway.home.name}")
    return Graph(store, gateway, ranks=ranks, placed=placed)


def _check_endpoint(endpoint: object) -> None:
    address, _, port = str(endpoint).removeprefix("tcp://").rpartition(":")
    if not (str(endpoint).startswith("tcp://") and address and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise SettingsError(f"{endpoint!r} is no endpoint of a graph server; those are tcp://host:port")


def _places(endpoints: Sequence[str], keys: CurveKeys | None, deadline: float) -> list[ServerPlace]:
    """The servers at these endpoints that answer, then the others that they know of.

    Raises ``ServiceError`` when none answers, saying why for each.
    """
    clients = [
        HostClient(_unmet(endpoint), min(deadline, _HELLO), keys, gone_after=min(GONE_AFTER, deadline))
        for endpoint in endpoints
    ]
    try:
        found, problems = _greeted(clients, min(deadline, _HELLO))
    finally:
        for client in clients:
            client.close()
    if not found:
        raise ServiceError(_why_none(endpoints, problems))
    met = {info.node_rank for _, info in found}
    places = [_met(endpoint, info) for endpoint, info in found]
    return places + [place for place in found[0][1].servers if place.node_rank not in met]


def _greeted(clients: Sequence[HostClient], patience: float) -> tuple[list[tuple[str, HelloInfo]], list[str]]:
    """Who answers at each endpoint, and what is wrong with the others, in words."""
    until = time.monotonic() + patience
    hellos = [(client, client.submit_hello()) for client in clients]
    found, problems = [], []
    for client, hello in hellos:
        try:
            found.append((client.endpoint, hello.result(max(0.0, until - time.monotonic()))))
        except ServiceError as error:
            problems.append(str(error))
    return found, problems


def _why_none(endpoints: Sequence[str], problems: Sequence[str]) -> str:
    """The problem with each endpoint; once where it is the same everywhere."""
    kinds = {
        re.sub(r"within [\d.]+ s", "", problem.replace(endpoint, ""))
        for endpoint, problem in zip(endpoints, problems, strict=True)
    }
    if len(problems) > 1 and len(kinds) == 1:
        return f"{problems[0]} It is the same at {', '.join(endpoints[1:])}"
    return "\n".join(problems)


def _unmet(endpoint: str) -> ServerPlace:
    return ServerPlace("", -1, "", endpoint, ())


def _met(endpoint: str, info: HelloInfo) -> ServerPlace:
    """A server as it says who it is, where the user reaches it."""
    listed = [place for place in info.servers if place.node_rank == info.node_rank]
    name = listed[0].name if listed else f"node{info.node_rank} ({info.host})"
    return ServerPlace(name, info.node_rank, info.host, endpoint, info.part_ids)
