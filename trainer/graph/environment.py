"""Implements ``gnnfleet.open``: opens the graph of the run that this process belongs to, or a partition folder."""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.core.errors import ServiceError, SettingsError
from trainer.core.ranks import Ranks, keep_process_group
from trainer.core.remote_settings import RemoteAccess
from trainer.core.waits import report_uncaught
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.store.digest_check import checked_digests
from trainer.store.part_store import open_parts

if TYPE_CHECKING:
    from trainer.service.cluster import Cluster

_POLL = 0.02  #: seconds between checks for a graph server's ready file

#: Variables that the launcher sets for every process of a run.
_RUN_VARIABLES = ("GNNFLEET_PARTS", "GNNFLEET_PART_IDS", "GNNFLEET_CLUSTER")


def open_any(
    path: str | Path | None = None, part: int | Sequence[int] | None = None, *, cluster: str | Path | None = None,
    node_rank: int | None = None, key_file: str | Path | None = None, deadline: float = 120.0,
    environ: Mapping[str, str] = os.environ,
) -> Graph:  # fmt: skip
    if path is not None and not isinstance(path, (str, Path)):
        raise SettingsError(
            f"gnnfleet.open takes the path of a partition folder, not {type(path).__name__};"
            " pass Data, HeteroData or a (feature store, graph store) pair directly to the loader"
        )
    if path is not None and Path(path).is_file():
        raise SettingsError(
            f"{path} is a file, not a partition folder; make a partition folder from it by `gnnfleet partition"
            f" make --dataset file --source {path} --num-parts 2 --out parts`, then call gnnfleet.open('parts')"
        )
    report_uncaught(environ)
    keep_process_group()
    ranks = this_process(environ)
    ranks = ranks if node_rank is None else replace(ranks, node_rank=node_rank)
    cluster, key_file = cluster or environ.get("GNNFLEET_CLUSTER"), key_file or environ.get("GNNFLEET_SERVICE_KEY")
    if path is None and part is None and is_client(cluster, ranks.node_rank):
        from trainer.graph.connect import open_client

        assert cluster is not None
        return open_client(
            _cluster(cluster), ranks, key_file=key_file, deadline=deadline,
            remote_access=RemoteAccess.from_env(environ), placed=_layout_of_run(cluster, ranks),
        )  # fmt: skip
    in_run = path is None
    if path is None:
        if missing := [name for name in _RUN_VARIABLES if name not in environ]:
            raise SettingsError(
                f"{', '.join(missing)} not set; start the script by launch.py --config FILE -- python …,"
                " or pass the partition folder: gnnfleet.open('parts')"
            )
        path = environ["GNNFLEET_PARTS"]
    placed = _layout_of_run(cluster, ranks) if cluster else None
    if part is not None:
        part_ids: Sequence[int] | None = _part_ids(part)
    else:
        part_ids = _cluster(cluster).node(ranks.node_rank).parts if cluster else None
    access = RemoteAccess.from_env(environ)
    if in_run and compares_digests(ranks, environ) and environ.get("GNNFLEET_DIGESTS", "1") != "0":
        with checked_digests(open_parts(path, part_ids, access.topology)):
            pass
    return open_graph(
        path, part_ids, cluster_file=cluster, node_rank=ranks.node_rank, key_file=key_file, deadline=deadline,
        ranks=ranks, placed=placed, remote_access=access,
    )  # fmt: skip


def compares_digests(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process compares the files it opens with the digests in the manifest.

    True on the first rank of a node without a graph server. A graph server compares the files of its node.
    """
    return ranks.local_rank == 0 and not environ.get("GNNFLEET_SERVER_READY")


def await_own_server(environ: Mapping[str, str] = os.environ) -> None:
    """Wait until this node's graph server has written its ready file, if the launcher started one.

    Reads GNNFLEET_SERVER_READY (the file) and GNNFLEET_START_TIMEOUT (seconds). Raises ``ServiceError`` if the file is
    missing after this time. If the server fails, the supervisor usually ends the run earlier.
    """
    ready, seconds = environ.get("GNNFLEET_SERVER_READY"), float(environ.get("GNNFLEET_START_TIMEOUT") or 120)
    until = time.monotonic() + seconds
    while ready and not os.path.exists(ready):
        if time.monotonic() > until:
            raise ServiceError(
                f"node{environ.get('NODE_RANK', '0')}: its graph server was not ready within {seconds:g} s"
                " (run.start_timeout); see the server's log (gnnfleet logs --all)"
            )
        time.sleep(_POLL)


def is_client(cluster: str | Path | None, node_rank: int) -> bool:
    """Return whether a node of a run is a client, which holds no part and asks graph servers.

    Raises ``SettingsError`` for a bad cluster file.
    """
    nodes = _cluster(cluster).nodes if cluster else ()
    return any(node.node_rank == node_rank and node.role == "client" for node in nodes)


def _cluster(path: str | Path) -> Cluster:
    from trainer.service.cluster import read_cluster  # a process without other hosts does without the graph service

    return read_cluster(path)


def this_process(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return rank and world size from torchrun's variables or, without them, from an initialized process group."""
    ranks = Ranks.from_env(environ)
    torch = sys.modules.get("torch")  # not imported: no process group can exist
    if "RANK" in environ or torch is None:
        return ranks
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return ranks
    return replace(ranks, rank=dist.get_rank(), world_size=dist.get_world_size())


def _part_ids(part: Any) -> list[int]:
    with suppress(TypeError):
        return [operator.index(part)]
    try:
        return [operator.index(one) for one in part]
    except TypeError:
        raise SettingsError(f"part: {part!r}; expected the number of a part, or several") from None


def _layout_of_run(cluster: str | Path, ranks: Ranks) -> RankLayout | None:
    """Return, for each part, the ranks on hosts that store it, as the cluster file states.

    Returns None if this process is the only rank, and the file lists another number of ranks. Raises ``SettingsError``
    if several ranks were started, but not as many as the file lists.
    """
    layout = RankLayout.from_cluster(_cluster(cluster))
    if layout.world_size == ranks.world_size:
        return layout
    if ranks.world_size == 1:
        return None
    raise SettingsError(
        f"cluster file {cluster} places {layout.world_size} ranks, but {ranks.world_size} were started;"
        f" start {layout.world_size} ranks, or pass the cluster file of this run"
    )
