"""The graph of the run this process belongs to: for training scripts of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.errors import SettingsError
from trainer.load.open import Graph, open_graph
from trainer.load.seeds import RankLayout
from trainer.ranks import Ranks
from trainer.service.cluster import read_cluster


def open_run(environ: Mapping[str, str] = os.environ, deadline: float = 120.0) -> tuple[Graph, Ranks, RankLayout]:
    """This node's parts opened, the other nodes connected to, and where this process stands.

    Reads what the launcher sets: GNNFLEET_PARTS, GNNFLEET_PART_IDS, GNNFLEET_CLUSTER,
    GNNFLEET_SERVICE_KEY and torchrun's variables. Pass rank and layout on to a loader; close
    the graph when all ranks are done. Raises ``SettingsError`` outside a run, ``PartitionError``
    and ``ServiceError`` as ``open_graph`` does.
    """
    missing = [name for name in ("GNNFLEET_PARTS", "GNNFLEET_PART_IDS", "GNNFLEET_CLUSTER") if name not in environ]
    if missing:
        raise SettingsError(f"{', '.join(missing)} not set; start the script by launch.py --config FILE -- python …")
    ranks = Ranks.from_env(environ)
    layout = RankLayout.from_cluster(read_cluster(environ["GNNFLEET_CLUSTER"]))
    graph = open_graph(
        environ["GNNFLEET_PARTS"],
        [int(part) for part in environ["GNNFLEET_PART_IDS"].split(",") if part],
        cluster_file=environ["GNNFLEET_CLUSTER"],
        node_rank=ranks.node_rank,
        key_file=environ.get("GNNFLEET_SERVICE_KEY"),
        deadline=deadline,
    )
    return graph, ranks, layout
