"""Checkpoint files: written atomically, readable with ``torch.load(weights_only=True)``."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.core.errors import CheckpointError
from trainer.core.files import write_whole
from trainer.core.schema import NodeType, type_name
from trainer.store.manifest import Manifest
from trainer.train.settings import TrainSettings

FORMAT = "gnnfleet-checkpoint"

VERSION = 2

KEPT_EPOCHS = 2  #: number of newest epoch files that are kept, besides the best one

#: Settings that change the loss curve; a run can be resumed only with the same values.
BINDING = (
    "model", "hidden", "layers", "heads", "dropout", "fanouts", "replace", "weight_attr", "time_attr",
    "temporal_strategy", "disjoint", "batch_size", "lr", "embedding_lr", "weight_decay", "seed", "precision",
)  # fmt: skip

_SINCE = {"precision": "float32"}  #: values of settings that older files of this version lack


@dataclass(frozen=True)
class BestEpoch:
    """Weights after the epoch with the best val accuracy so far."""

    epoch: int
    val_accuracy: float
    model: Mapping[str, Tensor]
    embedding: Mapping[NodeType, Tensor] | None = None  #: tables of featureless types; on rank 0 only


@dataclass(frozen=True)
class Checkpoint:
    """State needed to continue a run exactly after ``epoch``."""

    epoch: int  #: epochs done
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]  #: from ``settings_record``
    graph: Mapping[str, Any]  #: from ``graph_record``
    step_loss: tuple[Tensor, ...]  #: one float64 [steps] per epoch done
    best: BestEpoch | None  #: None before the first evaluation
    embedding: Mapping[str, Any] | None = None  #: from ``embedding_state``; on rank 0 only

    def without_tables(self) -> Checkpoint:
        """A copy without embedding tables, to send to all ranks; ``scatter_tables`` sends the rows of the tables."""
        return replace(self, embedding=None, best=self.best and replace(self.best, embedding=None))

    def content(self) -> dict[str, Any]:
        """The checkpoint as dicts, lists, tensors and numbers, for ``weights_only`` and for sending to ranks."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        best = self.best
        values["best"] = best and {entry.name: getattr(best, entry.name) for entry in fields(best)}
        return {**values, "step_loss": list(self.step_loss)}

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> Checkpoint:
        """Make a checkpoint from what ``content`` returned."""
        values = {entry.name: content[entry.name] for entry in fields(cls)}
        best = values.pop("best")
        values["step_loss"] = tuple(values["step_loss"])
        return cls(**values, best=BestEpoch(**best) if best else None)


def settings_record(settings: TrainSettings) -> dict[str, Any]:
    """The settings as a dict of plain values; ``layers`` is never None."""
    return {**asdict(settings), "layers": len(settings.fanouts)}


def graph_record(manifest: Manifest, target: NodeType) -> dict[str, Any]:
    """Return what identifies a dataset and the trained node type; the same for every partition of the dataset."""
    return {
        "dataset": manifest.dataset,
        "num_nodes": {of: spec.num_nodes for of, spec in manifest.nodes.items()},
        "num_edges": {type_name(of): spec.num_edges for of, spec in manifest.edges.items()},
        "target": target,
        "num_classes": manifest.nodes[target].num_classes,
    }


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``epoch-0007.pt`` and ``last.pt``, then delete older epoch files; returns the path of the epoch file.

    Raises ``CheckpointError`` if the folder cannot be written.
    """
    path = folder / f"epoch-{checkpoint.epoch:04d}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "version": VERSION, **checkpoint.content()}
        write_whole(path, lambda file: torch.save(content, file), sync=True)
        _point_to(folder / "last.pt", path)
        _prune(folder, checkpoint)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be written: {error.strerror or error}") from error
    return path


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint of the bundled trainer onto the CPU.

    Args:
        path: A file of ``runs/<run_id>/checkpoints``.

    Returns:
        Settings, weights, optimizer state and best weights of the run.

    Raises:
        CheckpointError: The file is missing, damaged or not a checkpoint.
    """
    try:
        raw = torch.load(io.BytesIO(Path(path).read_bytes()), map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from None
    except Exception as error:  # torch.load passes on errors of its zip reader and unpickler
        raise CheckpointError(f"checkpoint {path} is damaged or no checkpoint: {_first_line(error)}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise CheckpointError(f"{path} is not a {FORMAT} of version {VERSION}; give a file from a checkpoints folder")
    return Checkpoint.of_content(raw)


def check_fits(
    checkpoint: Checkpoint, settings: TrainSettings, graph: Mapping[str, Any], path: str | Path
) -> None:  # fmt: skip
    """Raise ``CheckpointError`` naming every setting and graph property that differs from this run's.

    graph: the ``graph_record`` of this run.
    """
    ours = settings_record(settings)
    saved = {**_SINCE, **checkpoint.settings}
    pairs = [(name, saved.get(name), ours[name]) for name in BINDING]
    pairs += [(name, checkpoint.graph.get(name), value) for name, value in graph.items()]
    problems = [f"{name} is {new}, in the checkpoint {old}" for name, old, new in pairs if old != new]
    if problems:
        raise CheckpointError(f"checkpoint {path} is of another run: {'; '.join(problems)}")


def _point_to(link: Path, target: Path) -> None:
    """Make ``link`` a hard link to ``target``, or a copy if the file system has no hard links."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(target, temporary)
    except OSError:
        shutil.copyfile(target, temporary)
    temporary.replace(link)


def _prune(folder: Path, newest: Checkpoint) -> None:
    """Keep the ``KEPT_EPOCHS`` last epoch files up to ``newest`` and that of the best epoch; delete older ones."""
    epochs = {int(path.stem[6:]): path for path in folder.glob("epoch-*.pt") if re.fullmatch(r"epoch-\d+", path.stem)}
    older = sorted(epoch for epoch in epochs if epoch < newest.epoch)
    for epoch in older[: len(older) - (KEPT_EPOCHS - 1)]:
        if newest.best is None or epoch != newest.best.epoch:
            epochs[epoch].unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
