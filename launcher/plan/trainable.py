"""Whether the bundled trainer finds anything to train on in a partition folder, before it is sent anywhere."""

from __future__ import annotations

from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.plan.manifest import PartitionFiles


def check_train_seeds(config: ClusterConfig, parts: PartitionFiles) -> None:
    """Raises UsageError for parts without train seeds (of ``train.target``, where that is set)."""
    target = config.train.target
    if target is not None and target in parts.train_seeds:
        seeds, whose, where = parts.train_seeds[target], f"node type {target} has", f" of {target}"
    else:  # a type that is not there is for the trainer to refuse, who lists those that are
        seeds, whose, where = sum(parts.train_seeds.values()), "the graph has", ""
    if seeds or not parts.train_seeds:
        return
    raise UsageError(
        f"{config.data.source or parts.dataset}: {whose} no train split, which the bundled trainer needs (parts in "
        f"{parts.folder}); nothing was sent. Add train_idx or train_mask{where} to the graph (docs/data.md), or run a "
        "script of your own on these parts: gnnfleet launch -- python SCRIPT"
    )
