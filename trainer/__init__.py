"""gnnfleet's distributed trainer: partitioning, sampling, graph service and training.

This package never imports ``launcher``. Launcher and trainer communicate through command lines, environment variables
and the files described in ``docs/ARCHITECTURE.md``; ``trainer.core.train_config`` declares the settings for both.

Scripts should import the public names from ``gnnfleet`` instead, because a file trainer.py beside a script would shadow
this package.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.graph.open import Graph
    from trainer.loader.anchor_loader import DistAnchorNeighborLoader
    from trainer.loader.cluster_gcn import DistClusterLoader
    from trainer.loader.graph_saint import (
        DistGraphSAINTEdgeSampler,
        DistGraphSAINTNodeSampler,
        DistGraphSAINTRandomWalkSampler,
    )
    from trainer.loader.link_loader import DistLinkNeighborLoader
    from trainer.loader.neighbor_loader import DistNeighborLoader
    from trainer.loader.rule_loaders import DistPPRLoader, DistWalkLoader
    from trainer.loader.shadow import DistShaDowKHopSampler
    from trainer.loader.zip_loader import DistZipLoader
    from trainer.train.script_run import Run, run
    from trainer.train.steplog import StepLog

__all__ = [
    "DistAnchorNeighborLoader",
    "DistClusterLoader",
    "DistGraphSAINTEdgeSampler",
    "DistGraphSAINTNodeSampler",
    "DistGraphSAINTRandomWalkSampler",
    "DistLinkNeighborLoader",
    "DistNeighborLoader",
    "DistPPRLoader",
    "DistShaDowKHopSampler",
    "DistWalkLoader",
    "DistZipLoader",
    "Run",
    "StepLog",
    "connect",
    "open",
    "run",
]

#: Name -> module, imported on first use, so that ``import trainer`` does not import torch.
_LAZY = {
    "DistAnchorNeighborLoader": "trainer.loader.anchor_loader",
    "DistClusterLoader": "trainer.loader.cluster_gcn",
    "DistGraphSAINTEdgeSampler": "trainer.loader.graph_saint",
    "DistGraphSAINTNodeSampler": "trainer.loader.graph_saint",
    "DistGraphSAINTRandomWalkSampler": "trainer.loader.graph_saint",
    "DistLinkNeighborLoader": "trainer.loader.link_loader",
    "DistNeighborLoader": "trainer.loader.neighbor_loader",
    "DistPPRLoader": "trainer.loader.rule_loaders",
    "DistShaDowKHopSampler": "trainer.loader.shadow",
    "DistWalkLoader": "trainer.loader.rule_loaders",
    "DistZipLoader": "trainer.loader.zip_loader",
    "Run": "trainer.train.script_run",
    "StepLog": "trainer.train.steplog",
    "run": "trainer.train.script_run",
}


def open(
    path: str | Path | None = None, part: int | Sequence[int] | None = None, *, cluster: str | Path | None = None,
    node_rank: int | None = None, key_file: str | Path | None = None, deadline: float = 120.0,
) -> Graph:  # fmt: skip
    """Open a partitioned graph for this process.

    The parts of this host are memory-mapped; other parts are read through the graph servers that ``cluster`` lists.
    Rank and world size are those of torchrun's environment variables, or of the initialized process group.

    Args:
        path: Partition folder. Default: the folder of the run that started this process (environment variable
            ``GNNFLEET_PARTS``).
        part: Id or ids of the parts to open from ``path``. Default: the parts that ``cluster`` assigns to this node, or
            all parts if there is no ``cluster``.
        cluster: Path of ``cluster.json``, which lists the graph servers of the other parts. Default: environment
            variable ``GNNFLEET_CLUSTER``.
        node_rank: Rank of this node in ``cluster``. Default: environment variable ``NODE_RANK`` or ``GROUP_RANK``.
        key_file: Key file of an encrypted graph service. Default: environment variable ``GNNFLEET_SERVICE_KEY``.
        deadline: Seconds that one request to another host may take.

    Returns:
        The opened graph. Close it, or use it in a ``with`` statement.

    Raises:
        SettingsError: ``path`` is a file or a graph in memory, or is omitted in a process that no run started.
        PartitionError: The folder or a part is missing or damaged, or a part is neither opened by this process nor
            served by a graph server.
        ServiceError: Another host does not answer within ``deadline``.

    Example:
        ```python
        import gnnfleet as gf

        with gf.open("parts") as graph:
            print(graph.num_nodes, graph.num_features, graph.num_classes)
        ```
    """
    from trainer.graph.environment import open_any

    return open_any(path, part, cluster=cluster, node_rank=node_rank, key_file=key_file, deadline=deadline)


def connect(
    endpoint: str | Sequence[str] | None = None, key: str | Path | None = None, *, deadline: float = 60.0,
    name: str = "notebook",
) -> Graph:  # fmt: skip
    """Open a graph through graph servers, from a process that holds no part of it.

    Notebooks and remote inference use this function. All loaders accept the graph and yield the same batches as on the
    servers' hosts. The servers make the batches; the argument ``prefetch`` of a loader is the number of batches that
    it requests ahead. Rank and world size are as in ``open``.

    Args:
        endpoint: ``tcp://host:port`` of one or several graph servers. Default: the endpoints in the key file. The first
            server that answers reports the other servers of its cluster.
        key: Key file with mode 0600, written by ``gnnfleet serve key NAME -o FILE``. None if the servers do not
            encrypt.
        deadline: Seconds that one request may take; also the seconds to wait until a lost server is reachable again.
        name: Name of this process in the output of ``gnnfleet serve status``.

    Returns:
        The opened graph. Close it, or use it in a ``with`` statement.

    Raises:
        SettingsError: An endpoint is not ``tcp://host:port``, or neither ``endpoint`` nor the key file has one.
        ServiceError: No server can be reached, the key is not admitted, or the endpoint is not a graph server.

    Example:
        ```python
        import gnnfleet as gf

        with gf.connect("tcp://10.0.0.2:29601", key="products.key") as graph:
            loader = gf.DistNeighborLoader(graph, [10, 5], "test", batch_size=512)
            batch = next(iter(loader))
        ```
    """
    from trainer.graph.connect import connect_servers
    from trainer.graph.environment import this_process

    return connect_servers(endpoint, key, this_process(), deadline=deadline, name=name)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        nearest = difflib.get_close_matches(name, __all__, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise AttributeError(f"module 'trainer' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
