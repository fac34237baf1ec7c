"""Trainable embeddings of columns of categories, which stand beside the features of nodes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.core.batch import Batch, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.graph_attrs import CATEGORIES
from trainer.core.schema import HOMO_NODE, NodeType
from trainer.store.manifest import Manifest

_MOST = 100_000  #: categories of a column that are embedded

_WIDEST = 1024

B = TypeVar("B", Batch, HeteroBatch)


@dataclass(frozen=True)
class Category:
    """A column of categories of one node type: a 1-d integer attribute of codes from 0, -1 for a missing value."""

    name: str  #: name of the attribute
    count: int  #: number of categories
    dim: int  #: width of an embedding
    texts: tuple[str, ...] = ()  #: the categories in the order of their codes; (): not read


Categories = Mapping[NodeType, tuple[Category, ...]]


def texts_name(manifest: Manifest, of: NodeType, name: str) -> str:
    """Return the name of the graph attribute with the texts of the attribute ``name`` of node type ``of``."""
    return f"{of}__{name}__{CATEGORIES}" if manifest.hetero else f"{name}__{CATEGORIES}"


def categories_of(manifest: Manifest, dims: Mapping[str, int] | None = None) -> dict[NodeType, tuple[Category, ...]]:
    """Find the columns of categories of a graph: ``categories`` of its tables.

    Args:
        manifest: Manifest of the graph: ``graph.manifest``, or ``gnnfleet.read_manifest(folder)``.
        dims: Width of the embeddings of a column, by its name (``region``, or ``customer.region``); 0: left out.
            Default: half the number of categories, rounded up, at most 50.

    Returns:
        The columns by node type, for ``CategoryEmbeddings``; only types that have some.

    Raises:
        SettingsError: ``dims`` names no column, or a width is out of range; a column has more than 100,000 categories.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        for node_type, columns in gf.nn.categories_of(graph.manifest).items():
            print(node_type, [column.name for column in columns])
        ```
    """
    found: dict[NodeType, list[Category]] = {}
    known: dict[str, Category] = {}
    given = dict(dims or {})
    for of, spec in manifest.nodes.items():
        for name, attr in spec.attrs.items():
            texts = manifest.graph_attrs.get(texts_name(manifest, of, name))
            if texts is None or name == "y" or len(attr.shape) != 1 or not attr.dtype.startswith(("int", "uint")):
                continue
            count = texts.shape[0]
            dim = given.get(f"{of}.{name}", given.get(name, min(50, (count + 1) // 2)))
            known |= dict.fromkeys((name, f"{of}.{name}"), Category(name, count, dim))
            if count > _MOST and dim:
                raise SettingsError(
                    f"categories: {name} of {of} has {count:,} different values, more than {_MOST:,}: make it a node "
                    f"type of its own, whose nodes have trainable rows, or set category_dims: {{{name}: 0}}"
                )
            if dim:
                found.setdefault(of, []).append(Category(name, count, dim))
    for name, dim in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            there = ", ".join(sorted({f"{of}.{each.name}" for of, some in found.items() for each in some})) or "none"
            hint = f"did you mean {near[0]!r}?" if near else f"there is {there}"
            raise SettingsError(f"category_dims: no node type has a column of categories {name!r}; {hint}")
        if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim <= _WIDEST:
            raise SettingsError(f"category_dims: {name} is {dim!r}; it must be a whole number from 0 to {_WIDEST:,}")
    return {of: tuple(columns) for of, columns in found.items()}


class CategoryEmbeddings(nn.Module):
    """Embeddings of columns of categories, appended to the features of nodes.

    A missing value, and a code that is out of range, have a row of their own, which is 0 at first.

    Args:
        categories: Columns by node type, from ``categories_of``.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        graph = gf.open("parts")
        embeddings = gf.nn.CategoryEmbeddings(gf.nn.categories_of(graph.manifest))
        loader = gf.DistNeighborLoader(graph, [10, 5], batch_size=512, input_nodes="train")
        batch = next(iter(loader))
        x = embeddings.features(batch)  # [n, num_features + embeddings.width("node")]
        ```
    """

    def __init__(self, categories: Categories):
        super().__init__()
        self.categories = {of: tuple(columns) for of, columns in categories.items()}
        self.tables = nn.ModuleDict()
        for of, columns in self.categories.items():
            for column in columns:
                table = nn.Embedding(column.count + 1, column.dim)
                table.weight.data[0] = 0
                self.tables[_key(of, column.name)] = table
        self._rows: dict[str, Tensor] = {}  #: int64, row of each code, where the graph has codes of its own

    @property
    def names(self) -> dict[NodeType, tuple[str, ...]]:
        """Names of the columns by node type, as ``LoaderSettings.categories`` takes them."""
        return {of: tuple(column.name for column in columns) for of, columns in self.categories.items()}

    def width(self, of: NodeType) -> int:
        """Return the width of the embeddings of all columns of a node type together."""
        return sum(column.dim for column in self.categories.get(of, ()))

    def adopt(self, texts: Mapping[NodeType, Sequence[Sequence[str]]]) -> None:
        """Read the codes of another graph, whose columns have other categories.

        ``texts``: the categories of each column in the order of their codes, by node type. Those that this model does
        not know are treated as missing.
        """
        for of, columns in self.categories.items():
            for column, new in zip(columns, texts[of], strict=True):
                row = {text: number for number, text in enumerate(column.texts, start=1)}
                if column.texts and tuple(new) != column.texts:
                    self._rows[_key(of, column.name)] = torch.tensor([0, *(row.get(text, 0) for text in new)])

    def rows(self, of: NodeType, codes: Tensor) -> Tensor:
        """Return the embeddings of nodes, float32 [n, width]. codes: integers [n, columns], -1 for missing values."""
        found = []
        for number, column in enumerate(self.categories[of]):
            key, at = _key(of, column.name), codes[:, number].long() + 1
            if (mapped := self._rows.get(key)) is not None:
                at = mapped.to(at.device)[torch.where((at < 0) | (at >= len(mapped)), 0, at)]
            found.append(self.tables[key](torch.where((at < 0) | (at > column.count), 0, at)))
        return torch.cat(found, 1)

    def forward(self, batch: B) -> B:
        """Return a batch of ``BatchLoader`` whose ``x`` has the embeddings, after the features."""
        if not self.categories:
            return batch
        if isinstance(batch, Batch):
            assert batch.categories is not None, "the loader gathers categories"
            return replace(batch, x=self._appended(HOMO_NODE, batch.x, batch.categories))
        codes = {of: batch.categories[of] for of in self.categories}
        return replace(batch, x={**batch.x, **{of: self._appended(of, batch.x.get(of), codes[of]) for of in codes}})

    def features(self, data: Any) -> Any:
        """Return the features of a batch with their embeddings, from its attributes named as the columns.

        Args:
            data: Batch of a loader, ``Data`` or ``HeteroData``.

        Returns:
            Float [n, features + width]; for ``HeteroData`` by node type, of the types that have features or columns.
        """
        if not hasattr(data, "node_types"):
            return self._of_store(HOMO_NODE, data)
        return {of: self._of_store(of, data[of]) for of in data.node_types if of in self.categories or "x" in data[of]}

    def _of_store(self, of: NodeType, store: Any) -> Tensor:
        x: Tensor | None = store["x"] if "x" in store else None
        if of not in self.categories:
            assert x is not None
            return x
        return self._appended(of, x, torch.stack([store[column.name] for column in self.categories[of]], 1))

    def _appended(self, of: NodeType, x: Tensor | None, codes: Tensor) -> Tensor:
        rows = self.rows(of, codes)
        return rows if x is None else torch.cat([x, rows], 1)


def _key(of: NodeType, name: str) -> str:
    return f"{of}__{name}".replace(".", "#")  # torch allows no "." in the name of a module
