"""Checkpoint files: written atomically, with a digest, readable with ``torch.load(weights_only=True)``.

The digest is the comment of the ZIP archive that ``torch.save`` writes.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer.core.errors import CheckpointError
from trainer.core.files import write_whole
from trainer.core.rng import DRAWS
from trainer.core.schema import EdgeType, LinkTypes, NodeType, target_name, type_name
from trainer.store.manifest import Manifest
from trainer.train.settings import TrainSettings
from trainer.train.tasks.task import metric_named

FORMAT = "gnnfleet-checkpoint"

VERSION = 6

_KEPT = 2  #: number of newest files kept: this many after whole epochs, and this many later ones within an epoch

Position = tuple[int, int]  #: complete epochs, and steps trained of the next epoch; a later position is greater

#: Settings that change the loss curve; a run can be resumed only with the same values.
BINDING = (
    "model", "model_args", "hidden", "layers", "max_tokens", "heads", "output_heads", "activation", "dropout",
    "input_dropout", "attention_dropout", "fanouts", "neighbors", "replace", "weight_attr", "time_attr",
    "category_dims", "temporal_strategy", "disjoint", "batch_size", "lr", "embedding_lr", "weight_decay", "seed",
    "precision", "optimizer", "schedule", "clip", "class_weights", "label_smoothing", "negatives", "loss",
    "edge_attr", "embeddings", "hard_negatives", "num_hard_negatives", "decoder",
    "hide",
)  # fmt: skip


@dataclass(frozen=True)
class BestEpoch:
    """Weights after the best epoch so far, by the task's metric on the val split."""

    epoch: int
    metrics: Mapping[str, float]  #: metrics on the val split by name
    model: Mapping[str, Tensor]
    embedding: Mapping[NodeType, Tensor] | None = None  #: tables of trainable rows; on rank 0 only


@dataclass(frozen=True)
class PartialEpoch:
    """Loss and number of seeds of each step trained so far in an unfinished epoch."""

    loss_sums: Tensor  #: float64 [steps], sum of the loss over each step's seeds, over all ranks
    sizes: Tensor  #: int64 [steps], seeds of each step over all ranks


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after ``epoch`` complete epochs and the steps in ``partial``.

    A resumed run continues exactly from this state.
    """

    epoch: int  #: number of complete epochs
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]  #: result of ``settings_record``
    graph: Mapping[str, Any]  #: result of ``graph_record``
    task: Mapping[str, Any]  #: result of ``Task.record``
    step_loss: tuple[Tensor, ...]  #: one float64 [steps] per complete epoch
    best: BestEpoch | None  #: None before the first evaluation
    embedding: Mapping[str, Any] | None = None  #: result of ``embedding_state``; on rank 0 only
    partial: PartialEpoch | None = None  #: steps trained of epoch ``epoch + 1``; None before its first step
    scores: tuple[Mapping[str, float], ...] = ()  #: of all evaluations on val: ``epoch``, ``loss`` and the metrics
    built_from: Mapping[str, Any] = field(default_factory=dict)  #: what ``trained_model`` builds the model from
    draws: int = DRAWS  #: version of the random draws that chose seeds and neighbours

    @property
    def position(self) -> Position:
        """Number of complete epochs, and number of steps trained of the next epoch."""
        return self.epoch, len(self.partial.sizes) if self.partial else 0

    def without_tables(self) -> Checkpoint:
        """Return a copy without embedding tables, to send to all ranks."""
        return replace(self, embedding=None, best=self.best and replace(self.best, embedding=None))

    def content(self) -> dict[str, Any]:
        """Return the checkpoint as plain values and tensors, which ``torch.load(weights_only=True)`` accepts."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("best", "partial"):
            part = values[name]
            values[name] = part and {entry.name: getattr(part, entry.name) for entry in fields(part)}
        return {**values, "step_loss": list(self.step_loss), "scores": list(self.scores)}

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> Checkpoint:
        values = {entry.name: content[entry.name] for entry in fields(cls) if entry.name in content}
        best, partial = values.pop("best"), values.pop("partial", None)
        values["step_loss"], values["scores"] = tuple(values["step_loss"]), tuple(values["scores"])
        return cls(
            **values, best=BestEpoch(**best) if best else None, partial=PartialEpoch(**partial) if partial else None
        )


def settings_record(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings as plain values, with the number of layers, and the file of a class as it is kept."""
    layers = settings.layers if settings.model == "token-transformer" else len(settings.fanouts) or None
    model = settings.model
    if ":" in model:
        from trainer.own.model_class import relative_name

        model = relative_name(model)
    return {**asdict(settings), "model": model, "layers": layers}


def graph_record(manifest: Manifest, target: NodeType | EdgeType | LinkTypes) -> dict[str, Any]:
    """Return properties that identify a dataset and the target: a node type, or the edge types of links.

    They are equal for all partitions of a dataset.
    """
    return {
        "dataset": manifest.dataset,
        "num_nodes": {of: spec.num_nodes for of, spec in manifest.nodes.items()},
        "num_edges": {type_name(of): spec.num_edges for of, spec in manifest.edges.items()},
        "target": target_name(target),
        "num_classes": manifest.nodes[target].num_classes if isinstance(target, str) else 0,
    }


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint file and make ``last.pt`` refer to it, then delete files that are no longer needed.

    Args:
        folder: Folder of the run's checkpoints.
        checkpoint: State to save.

    Returns:
        Path of the file: ``epoch-0007.pt`` after epoch 7, ``epoch-0007-step-000120.pt`` after 120 steps of epoch 8.

    Raises:
        CheckpointError: The folder cannot be written; earlier files are left as they were.
    """
    content = {"format": FORMAT, "version": VERSION, **checkpoint.content()}
    best = [checkpoint.best.epoch] if checkpoint.best else []
    metric = metric_named(checkpoint.task["metrics"][0])
    ranked = [score for score in checkpoint.scores if not math.isnan(score.get(metric.name, math.nan))]
    ranked.sort(key=lambda score: score[metric.name], reverse=metric.better == "higher")
    best += [int(score["epoch"]) for score in ranked]
    return save_content(folder, checkpoint.position, content, best, checkpoint.settings["keep"])


def save_content(
    folder: Path, position: Position, content: Mapping[str, Any], best: Sequence[int] = (), keep: int = 1
) -> Path:  # fmt: skip
    """Write ``content``, anything that ``torch.save`` accepts, to a checkpoint file, and return the file's path.

    Then makes ``last.pt`` refer to the file, and deletes old files. The first ``keep`` files of the epochs ``best``,
    the best one first, are kept. ``position``: epochs and steps done, which the file name states.
    """
    path = folder / file_name(position)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: _write_with_digest(content, file), sync=True)
        # ``last.pt`` becomes another name of the file, or a copy.
        temporary = folder / f".last.pt.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        temporary.replace(folder / "last.pt")
        # Keep the newest files of whole epochs, the newest ones within the current epoch, and those of the best epochs.
        known = sorted(at for at, _ in files_of(folder) if at <= position)
        epochs = [at for at in known if at[1] == 0]
        steps = [at for at in known if at[1] and at > max(epochs, default=(0, 0))]
        saved = [(epoch, 0) for epoch in dict.fromkeys(best) if (epoch, 0) in epochs]
        kept = {*epochs[-_KEPT:], *steps[-_KEPT:], *saved[:keep]}
        for at in known:
            if at not in kept:
                (folder / file_name(at)).unlink(missing_ok=True)
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
    raw = load_content(path)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise CheckpointError(f"{path} is not a {FORMAT} of version {VERSION}; give a file from a checkpoints folder")
    return Checkpoint.of_content(raw)


def load_content(path: str | Path) -> Any:
    """Check the digest of a file that ``save_content`` wrote, and return its content.

    Raises ``CheckpointError`` if the file is missing, damaged or no checkpoint.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from None
    # A file without a digest is none of ours; its format tells.
    comment, body = data[-_COMMENT_BYTES:], memoryview(data)[: -_COMMENT_BYTES - 2]
    if comment.startswith(_COMMENT) and hashlib.sha256(body).hexdigest().encode() != comment[len(_COMMENT) :]:
        raise CheckpointError(
            f"checkpoint {path} is damaged, or not a checkpoint: its content does not match its digest"
        )
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load passes on errors of its zip reader and unpickler
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"checkpoint {path} is damaged, or not a checkpoint: {reason}") from error


def file_name(position: Position) -> str:
    """Return the file name for a position: ``epoch-0007.pt``, ``epoch-0007-step-000120.pt``."""
    epoch, step = position
    return f"epoch-{epoch:04d}-step-{step:06d}.pt" if step else f"epoch-{epoch:04d}.pt"


def position_of(name: str) -> Position | None:
    """Return the position that the name of a checkpoint file states; None for the name of another file."""
    match = re.fullmatch(r"epoch-(\d{4,})(?:-step-(\d{6,}))?\.pt", name)
    return (int(match[1]), int(match[2] or 0)) if match else None


_COMMENT = b"sha256:"  # begins the archive's comment; the digest follows as 64 hexadecimal digits

_COMMENT_BYTES = len(_COMMENT) + 64


class _HashingFile:
    """A file opened for writing that computes the SHA-256 of all written bytes except the last two."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._held = file, hashlib.sha256(), b""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        if len(view) >= 2:
            self._digest.update(self._held)
            self._digest.update(view[:-2])
            self._held = bytes(view[-2:])
        else:
            self._digest.update((self._held + bytes(view))[:-2])
            self._held = (self._held + bytes(view))[-2:]
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _write_with_digest(content: Mapping[str, Any], file: BinaryIO) -> None:
    hashing = _HashingFile(file)
    torch.save(content, hashing)  # type: ignore[arg-type]  # it needs only ``write`` and ``flush``
    file.seek(-2, os.SEEK_CUR)
    # The digest covers the archive up to the length of the comment, which is its last field.
    file.write(_COMMENT_BYTES.to_bytes(2, "little") + _COMMENT + hashing.hexdigest().encode())


def check_fits(
    checkpoint: Checkpoint, settings: TrainSettings, graph: Mapping[str, Any], path: str | Path, kind: str
) -> None:  # fmt: skip
    """Raise ``CheckpointError`` with each setting and graph property in which a checkpoint differs from this run.

    graph: result of ``graph_record`` for this run. kind: kind of this run's task.
    """
    ours = settings_record(settings)
    saved = checkpoint.settings
    pairs = [(name, saved.get(name), ours[name]) for name in BINDING]
    pairs += [(name, checkpoint.graph.get(name), value) for name, value in graph.items()]
    pairs += [("task", checkpoint.task["kind"], kind)]
    pairs += [("the version of the random draws", checkpoint.draws, DRAWS)]
    problems = [f"{name} is {new}, in the checkpoint {old}" for name, old, new in pairs if old != new]
    if problems:
        raise CheckpointError(f"checkpoint {path} belongs to another run: {'; '.join(problems)}")


def files_of(folder: Path) -> Iterator[tuple[Position, Path]]:
    """Yield position and path of each checkpoint file in ``folder``, except ``last.pt``."""
    for path in folder.glob("epoch-*.pt"):
        position = position_of(path.name)
        if position is not None:
            yield position, path
