"""Public API of gnnfleet for scripts and notebooks: open a graph, load batches, train.

Layers, losses and metrics are in ``gnnfleet.nn``; ``gnnfleet.tasks`` runs tasks of fabric (an SSH library). The names
are defined in ``trainer`` and ``launcher`` and imported at their first use, so ``import gnnfleet`` alone imports
neither torch nor fabric.

Example:
    ```python
    import gnnfleet as gf

    graph = gf.open("parts")  # gf.open() in a script that the launcher starts
    loader = gf.DistNeighborLoader(graph, [10, 5], "train", batch_size=512, shuffle=True)
    batch = next(iter(loader))
    ```

    From any machine, ``gf.connect("tcp://10.0.0.2:29601", key="products.key")`` opens the graph of a serving cluster.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from gnnfleet.shadow import check_not_shadowed

if TYPE_CHECKING:
    from gnnfleet import nn, tasks
    from launcher import __version__
    from launcher.errors import FleetError
    from launcher.manage.from_python import LaunchedRun, RunFailed, launch
    from trainer import (
        DistAnchorNeighborLoader,
        DistClusterLoader,
        DistGraphSAINTEdgeSampler,
        DistGraphSAINTNodeSampler,
        DistGraphSAINTRandomWalkSampler,
        DistLinkNeighborLoader,
        DistNeighborLoader,
        DistPPRLoader,
        DistShaDowKHopSampler,
        DistWalkLoader,
        DistZipLoader,
        Run,
        StepLog,
        connect,
        open,
        run,
    )
    from trainer.core.errors import (
        CheckpointError,
        DataError,
        PartitionError,
        ServiceError,
        SettingsError,
        TrainerError,
    )
    from trainer.core.graph_attrs import decode_texts
    from trainer.core.ranks import RankGroup, Ranks
    from trainer.core.schema import HOMO_EDGE, HOMO_NODE, type_of
    from trainer.graph.open import Graph
    from trainer.graph.seed_order import RankLayout
    from trainer.loader.block_loader import BatchLoader, LoaderSettings
    from trainer.loader.encodings import AddHopDistance, AddRandomWalkPE
    from trainer.nn.layerwise_inference import WholeGraph
    from trainer.sampler.types import RowRequest
    from trainer.store.manifest import read_manifest
    from trainer.train.checkpoint import load_checkpoint
    from trainer.train.loaders import loader_settings
    from trainer.train.model import load_model, trained_model
    from trainer.train.settings import TrainSettings

__all__ = [
    "HOMO_EDGE",
    "HOMO_NODE",
    "AddHopDistance",
    "AddRandomWalkPE",
    "BatchLoader",
    "CheckpointError",
    "DataError",
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
    "FleetError",
    "Graph",
    "LaunchedRun",
    "LoaderSettings",
    "PartitionError",
    "RankGroup",
    "RankLayout",
    "Ranks",
    "RowRequest",
    "Run",
    "RunFailed",
    "ServiceError",
    "SettingsError",
    "StepLog",
    "TrainSettings",
    "TrainerError",
    "WholeGraph",
    "__version__",
    "connect",
    "decode_texts",
    "launch",
    "load_checkpoint",
    "load_model",
    "loader_settings",
    "nn",
    "open",
    "read_manifest",
    "run",
    "tasks",
    "trained_model",
    "type_of",
]

#: Names of ``__all__`` by the module that defines them; ``trainer`` defines the names not listed here.
_DEFINED_IN = {
    "launcher": ("__version__",),
    "launcher.errors": ("FleetError",),
    "launcher.manage.from_python": ("LaunchedRun", "RunFailed", "launch"),
    "trainer.core.errors": (
        "CheckpointError", "DataError", "PartitionError", "ServiceError", "SettingsError", "TrainerError",
    ),
    "trainer.core.ranks": ("RankGroup", "Ranks"),
    "trainer.core.schema": ("HOMO_EDGE", "HOMO_NODE", "type_of"),
    "trainer.core.graph_attrs": ("decode_texts",),
    "trainer.graph.open": ("Graph",),
    "trainer.graph.seed_order": ("RankLayout",),
    "trainer.loader.block_loader": ("BatchLoader", "LoaderSettings"),
    "trainer.loader.encodings": ("AddHopDistance", "AddRandomWalkPE"),
    "trainer.sampler.types": ("RowRequest",),
    "trainer.store.manifest": ("read_manifest",),
    "trainer.train.checkpoint": ("load_checkpoint",),
    "trainer.nn.layerwise_inference": ("WholeGraph",),
    "trainer.train.loaders": ("loader_settings",),
    "trainer.train.model": ("load_model", "trained_model"),
    "trainer.train.settings": ("TrainSettings",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names}


check_not_shadowed("trainer")


if not TYPE_CHECKING:  # type checkers use the imports above and report unknown names

    def __getattr__(name: str) -> Any:
        if name in ("nn", "tasks"):
            return importlib.import_module(f"gnnfleet.{name}")
        if name not in __all__:
            nearest = difflib.get_close_matches(name, __all__, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise AttributeError(f"module 'gnnfleet' has no attribute {name!r}{hint}")
        if _MODULE_OF.get(name, "").startswith("launcher"):
            check_not_shadowed("launcher")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF.get(name, "trainer")), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
