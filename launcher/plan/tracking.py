"""What the trackers of a run (``train.track``) get: the settings that they show, and their files of a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from launcher.hostlist import fold
from launcher.plan.commands import PlanContext
from launcher.plan.model import PlannedFile, copied
from trainer.core.train_config import TRACKERS

#: Their files that a resumed run needs, below ``track/`` in the folder of the run before: where each one was, and the
#: local ones that it adds to. What W&B has sent is left out.
_NEEDED = (*(f"{name}.json" for name in TRACKERS), "tensorboard/**/*", "mlruns/**/*", "wandb/offline-run-*/**/*")


def tracking_job(context: PlanContext) -> Mapping[str, Any]:
    """Return ``track/job.json``: the trackers, and the run's settings without those that may hold credentials.

    Left out are ``env``, options of datasets and stores, and all that says how hosts are reached.
    """
    config, lead = context.config, context.facts.get(context.lead)
    train, data = context.train, config.data
    shown: dict[str, Any] = {
        **({"command": " ".join(context.own.argv)} if context.own else {"train": msgspec.to_builtins(train)}),
        "data": {
            "dataset": data.dataset,
            "num_parts": context.num_parts,
            "replicas": data.replicas,
            "cache": data.cache,
        },
        "partition": msgspec.to_builtins(data.partition),
        "cluster": {
            "name": config.name,
            "hosts": fold(node.host for node in config.nodes),
            "nodes": len(config.nodes),
            "ranks": context.world.size,
            "devices": sum(len(node.devices) for node in config.nodes),
            "roles": ", ".join(dict.fromkeys(node.role for node in config.nodes)),
            "wire_rows": config.run.wire_rows,
        },
        "versions": dict(lead.versions) if lead else {},
    }
    for name in ("track", "resume", "start"):
        shown.get("train", {}).pop(name, None)
    trackers = {name: options or {} for name, options in (train.track or {}).items()}
    return {"run_id": context.run_id, "trackers": trackers, "config": shown}


def earlier_files(checkpoint: str) -> tuple[PlannedFile, ...]:
    """Return the files of the trackers of the run that has a checkpoint, so that a resumed run continues in them.

    They go to ``track/before/``, as sending leaves files of digests beside them, which MLflow takes for metrics.
    """
    folder = Path(checkpoint).parent.parent / "track"
    if Path(checkpoint).parent.name != "checkpoints":
        return ()
    found = (path for pattern in _NEEDED for path in sorted(folder.glob(pattern)))
    files = [path for path in found if path.is_file() and not path.is_symlink()]
    return tuple(copied(f"track/before/{path.relative_to(folder).as_posix()}", path) for path in files)
