"""Checkpoints of a user's own training script: saved by ``StepLog.step``, restored by ``StepLog.restore``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.ranks import RankGroup, Ranks
from trainer.nn.sharded_embedding import ShardedEmbedding, embedding_state, load_embedding_state
from trainer.train.checkpoint import Position, load_content
from trainer.train.checkpoint_writer import (
    CheckpointRequest,
    CheckpointSchedule,
    CheckpointWriter,
    checkpoint_writers,
    cpu_copy,
)

FORMAT = "gnnfleet-script-checkpoint"

VERSION = 1


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class StartPosition:
    """The epoch and step with which a script's training loop begins: epoch 1 and step 0 if no checkpoint is restored.

    Args:
        epoch: Epoch, counted from 1.
        step: Step within the epoch, counted from 0. If the checkpoint was saved after the last step of the epoch, this
            is the number of steps of the epoch.
    """

    epoch: int = 1
    step: int = 0

    def first_step(self, epoch: int) -> int:
        """Return the first step to train in an epoch: ``self.step`` in epoch ``self.epoch``, 0 in later ones."""
        return self.step if epoch == self.epoch else 0


@dataclass(frozen=True)
class _Rows:
    embedding: ShardedEmbedding
    optimizer: Optimizer | None

    def gather(self, to: int) -> dict[str, Any] | None:
        state = embedding_state(self.embedding, self.optimizer, to)
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return state if state is None else state | {"optimizer_groups": options}

    def load(self, state: Mapping[str, Any] | None, groups: list[dict[str, Any]]) -> None:
        """Restore the rows, and the state and options of their optimizer. Collective.

        ``state``: on rank 0, the result of ``gather``; on other ranks None. ``groups``: on all ranks, the field
        ``optimizer_groups`` of this result.
        """
        load_embedding_state(self.embedding, state, self.optimizer)
        if self.optimizer is not None:
            for group, saved in zip(self.optimizer.param_groups, groups, strict=False):
                group.update(saved)

    def sizes(self) -> dict[str, list[int]]:
        return {of: [count, self.embedding.dim] for of, count in self.embedding.num_nodes.items()}


class ScriptCheckpoints:
    """Saves and restores the objects of a user's training script, such as model and optimizer.

    Rank 0 saves. In a run that restarts after failures, the first rank of each other node saves too. With a
    ``ShardedEmbedding``, at most two ranks save, and all ranks take part.

    Args:
        objects: Objects to save, by name. For a ``DistributedDataParallel``, the model in it is saved. The optimizer
            of a ``ShardedEmbedding`` is saved together with its rows.
        run_dir: Run folder of the node.
        ranks: Rank of this process.
        interval: Seconds between checkpoints within an epoch; 0: none.
        environ: Environment variables of the launcher.
    """

    def __init__(
        self, objects: Mapping[str, Stateful | ShardedEmbedding], run_dir: Path, ranks: Ranks, interval: float,
        environ: Mapping[str, str] = os.environ,
    ):  # fmt: skip
        # Sharded embeddings, each with its optimizer.
        embeddings = {name: one for name, one in objects.items() if isinstance(one, ShardedEmbedding)}
        optimizers = {
            name: [param for group in one.param_groups for param in group["params"]]
            for name, one in objects.items()
            if isinstance(one, Optimizer)
        }
        self._rows: dict[str, _Rows] = {}
        taken = set(embeddings)
        for name, embedding in embeddings.items():
            own = [of for of, params in optimizers.items() if any(param is embedding.weight for param in params)]
            if any(len(optimizers[of]) > 1 for of in own):
                raise SettingsError(
                    f"the optimizer {own[0]!r} updates the rows of {name!r} and other parameters; to save them, use a "
                    "separate optimizer for [embedding.weight]"
                )
            optimizer: Any = objects[own[0]] if own else None
            self._rows[name] = _Rows(embedding, optimizer)
            taken |= set(own)
        others: dict[str, Any] = {name: one for name, one in objects.items() if name not in taken}
        self._objects: dict[str, Stateful] = {name: _without_ddp(one) for name, one in others.items()}
        self._every_node = bool(int(environ.get("GNNFLEET_RESTARTS") or 0))
        self._saves = ranks.rank == 0 or (self._every_node and ranks.local_rank == 0)
        self._request = CheckpointRequest(run_dir)
        self._writer = CheckpointWriter(run_dir / "checkpoints", self._request)
        self._ranks, self._environ = ranks, environ
        self._writers: tuple[int, ...] = ()  #: ranks on which rows are gathered
        self._schedule: CheckpointSchedule | None = None  #: after which steps all ranks save together, if they do
        self._interval, self._since = interval, time.monotonic()
        self._looked = self._since  # time of the last look for a request
        self.saved: Position | None = None  #: position of the last checkpoint that this rank has saved

    def restore(self) -> StartPosition:
        """Restore all objects from the checkpoint that the run resumes from. Collective.

        Raises ``CheckpointError`` if rank 0 cannot read the file, or if the file does not fit the objects.
        """
        path = self._environ.get("GNNFLEET_RESUME")
        self._since = time.monotonic()
        if not path and not self._rows:
            return StartPosition()
        group = RankGroup.of_process(self._ranks)
        if self._rows:
            self._writers = checkpoint_writers(group, True, self._every_node)
            self._saves = group.rank in self._writers
            self._schedule = CheckpointSchedule(self._interval, group, request=self._request)
        if not path:
            return StartPosition()
        read = group.agree(lambda: self._read(path) if group.rank == 0 else None)
        tables = (read or {}).pop("rows", {})  # they stay on rank 0, which scatters them
        groups = {name: state["optimizer_groups"] for name, state in tables.items()}
        sizes = {
            name: {of: list(table.shape) for of, table in state["tables"].items()} for name, state in tables.items()
        }
        content: Any = group.from_first(read and read | {"row_groups": groups, "row_sizes": sizes})
        group.agree(lambda: self._load(path, content["objects"], content["row_sizes"]))
        for name, rows in self._rows.items():
            rows.load(tables.get(name), content["row_groups"][name])
        epoch, step = content["position"]
        return StartPosition(epoch + 1, step)

    def after_step(self, epoch: int, step: int) -> None:
        """Save a checkpoint if one is due. ``epoch`` counts from 1, ``step`` from 0.

        Collective if the objects include a ``ShardedEmbedding``.
        """
        if self._schedule is not None:
            if self._schedule.due():
                begin = time.monotonic()
                self._save((epoch - 1, step + 1))
                self._schedule.saved(time.monotonic() - begin)
        elif self._saves and self._interval > 0 and self._due() and not self._writer.busy:
            self._save((epoch - 1, step + 1))

    def _due(self) -> bool:
        """Return whether the interval since the last checkpoint is over, or the launcher requests a checkpoint.

        A request is noticed after at most a second.
        """
        now = time.monotonic()
        if now - self._since >= self._interval:
            return True
        if now - self._looked < 1.0:
            return False
        self._looked = now
        return self._request.pending()

    def after_epoch(self, epoch: int) -> None:
        """Save a checkpoint at the end of an epoch. ``epoch`` counts from 1.

        Collective if the objects include a ``ShardedEmbedding``.
        """
        if self._saves or self._rows:
            self._save((epoch, 0))
        if self._schedule is not None:
            self._schedule.saved()

    def close(self) -> None:
        self._writer.finish()

    def _save(self, position: Position) -> None:
        rows: dict[str, Any] = {}
        for name, one in self._rows.items():
            for rank in self._writers:
                rows[name] = one.gather(rank) or rows.get(name)
        if not self._saves:
            return
        states = {name: cpu_copy(one.state_dict()) for name, one in self._objects.items()}
        content = {"format": FORMAT, "version": VERSION, "position": list(position), "objects": states}
        content |= {"rows": rows} if rows else {}
        self._writer.begin_content(position, content)
        self.saved, self._since = position, time.monotonic()

    def _read(self, path: str) -> dict[str, Any]:
        content = load_content(path)
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise CheckpointError(f"{path} is not a {FORMAT} of version {VERSION}: another kind of run wrote it")
        return content

    def _load(self, path: str, states: Mapping[str, Any], row_sizes: Mapping[str, Any]) -> None:
        if {*states, *row_sizes} != {*self._objects, *self._rows}:
            saved, ours = ", ".join(sorted({*states, *row_sizes})), ", ".join(sorted({*self._objects, *self._rows}))
            raise CheckpointError(
                f"checkpoint {path} has the state of {saved}; this script restores {ours}: give StepLog.restore the "
                "same objects"
            )
        for name, rows in self._rows.items():
            if row_sizes[name] != rows.sizes():
                raise CheckpointError(
                    f"checkpoint {path} does not fit this script's {name}: its rows are {row_sizes[name]}, those of "
                    f"the script {rows.sizes()} (number and width by node type)"
                )
        for name, state in states.items():
            try:
                self._objects[name].load_state_dict(state)
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"checkpoint {path} does not fit this script's {name}: {error}") from error


def _without_ddp(one: Stateful) -> Stateful:
    """Return the model that a ``DistributedDataParallel`` wraps, and any other object unchanged."""
    wraps = type(one).__name__ == "DistributedDataParallel" and isinstance(getattr(one, "module", None), nn.Module)
    # Recognised by name, because importing the class takes seconds.
    return one.module if wraps else one  # type: ignore[attr-defined, no-any-return]
