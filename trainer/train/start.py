"""Starts a run from the weights of another run, all or those of some modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.core.errors import CheckpointError
from trainer.core.ranks import RankGroup
from trainer.core.schema import type_name
from trainer.core.train_config import Start
from trainer.nn.categories import table_name
from trainer.nn.sharded_embedding import ShardedEmbedding, gather_tables, scatter_tables
from trainer.train.checkpoint import load_checkpoint

_ROWS = "embedding"  #: module name of trainable rows; those of a node type are ``embedding.TYPE``


def start_from(start: Start, model: nn.Module, embedding: ShardedEmbedding | None, group: RankGroup) -> str:
    """Copy the best weights of a checkpoint, which rank 0 reads, to the model of all ranks. Collective.

    Returns in words what was copied. Raises ``CheckpointError`` on rank 0, and a ``PeerError`` with the same message on
    the other ranks, if a chosen module does not exist or has other shapes.
    """

    def read() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        if group.rank != 0:
            return {}, {}, 0
        saved = load_checkpoint(start.checkpoint)
        tables: Any = saved.best.embedding if saved.best else saved.embedding and saved.embedding["tables"]
        found = {**(saved.best or saved).model, **{f"{_ROWS}.{of}": table for of, table in (tables or {}).items()}}
        counts = embedding.num_nodes if embedding is not None else {}
        own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        own |= {f"{_ROWS}.{of}": (count, embedding.dim) for of, count in counts.items() if embedding is not None}
        chosen = {name: value for name, value in found.items() if _below(name, start.modules)}
        _check(start, found, chosen, own, model, saved.built_from["facts"])
        rows = {of: chosen.pop(f"{_ROWS}.{of}") for of in counts if f"{_ROWS}.{of}" in chosen}
        return chosen, rows, saved.best.epoch if saved.best else saved.epoch

    weights, tables, epoch = group.agree(read)
    weights, has_rows, count, epoch = group.from_first((weights, bool(tables), len(weights) + len(tables), epoch))
    model.load_state_dict(weights, strict=False)
    if embedding is not None and has_rows:
        whole = gather_tables(embedding, embedding.weight)
        embedding.weight.data.copy_(scatter_tables(embedding, None if whole is None else {**whole, **tables}))
    return f"starting from {count} tensors of {start.checkpoint} (epoch {epoch})"


def _below(name: str, modules: Sequence[str]) -> bool:
    return not modules or any(name == module or name.startswith(f"{module}.") for module in modules)


def _check(
    start: Start, found: Mapping[str, Tensor], chosen: Mapping[str, Tensor], own: Mapping[str, tuple[int, ...]],
    model: Any, saved: Mapping[str, Any],
) -> None:  # fmt: skip
    """Raise ``CheckpointError`` if the chosen tensors are not those of the modules of the own model.

    ``saved``: facts of the checkpoint's model.
    """
    for module in start.modules:
        for where, names in (("the checkpoint", found), ("the model", own)):
            if not any(_below(name, [module]) for name in names):
                there = ", ".join(sorted({name.partition(".")[0] for name in names}))
                raise CheckpointError(f"start: {where} has no module {module!r}; it has {there}")
    wanted = {name: shape for name, shape in own.items() if _below(name, start.modules)}
    shapes = {name: tuple(value.shape) for name, value in chosen.items()}
    problems = [
        f"{name} is {list(shape)}, in the checkpoint {list(shapes[name])}"
        for name, shape in wanted.items()
        if shapes.get(name, shape) != shape
    ]
    problems += [f"{name} is not in the checkpoint" for name in wanted if name not in shapes]
    problems += [f"{name} is only in the checkpoint" for name in shapes if name not in wanted]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"start: the weights of {start.checkpoint} do not fit the model: {'; '.join(problems[:3])}{more}; "
            "choose those that fit by start.modules"
        )
    # Embeddings of categories must stand for the same ones.
    here, theirs = (
        {
            table_name(of, column["name"]): (type_name(of), column["texts"])
            for of, columns in facts.get("categories", {}).items()
            for column in columns
        }
        for facts in (model.built_from["facts"], saved)
    )
    for name in chosen:
        _, is_table, table = name.rpartition("categories.tables.")
        column = table.removesuffix(".weight")
        if is_table and here.get(column) != theirs.get(column):
            raise CheckpointError(
                f"start: the categories of {here[column][0]} are others than in {start.checkpoint}; leave their "
                "embeddings out by start.modules"
            )
