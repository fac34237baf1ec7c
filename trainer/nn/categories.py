"""Trainable embeddings of columns of categories, which stand beside the features of nodes and edges."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.core.batch import Batch, Block, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.graph_attrs import CATEGORIES
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, AnyType, EdgeType, NodeType, reverse_type, type_name
from trainer.loader.block_loader import edge_columns
from trainer.store.manifest import AttrSpec, Manifest

_MOST = 100_000  #: categories of a column that are embedded

_WIDEST = 1024

B = TypeVar("B", Batch, HeteroBatch)


@dataclass(frozen=True)
class Category:
    """A column of categories of a type: a 1-d integer attribute of codes from 0, -1 for a missing value."""

    name: str  #: name of the attribute
    count: int  #: number of categories
    dim: int  #: width of an embedding; 0, of edges only: the column is left out
    texts: tuple[str, ...] = ()  #: the categories in the order of their codes; (): not read
    at: int = 0  #: of edges: the column of ``Block.edge_attr`` that has the codes


Categories = Mapping[AnyType, tuple[Category, ...]]


def texts_name(manifest: Manifest, of: AnyType, name: str) -> str:
    """Return the name of the graph attribute with the texts of the attribute ``name`` of type ``of``.

    Edges have the texts of their reverse type, unless they have their own.
    """
    plain = f"{name}__{CATEGORIES}"
    names = [f"{type_name(of)}__{plain}" if manifest.hetero or not isinstance(of, str) else plain]
    if not manifest.hetero and not isinstance(of, str) and name not in manifest.nodes[HOMO_NODE].attrs:
        names.append(plain)
    elif not isinstance(of, str) and (back := reverse_type(of, manifest.edges)):
        names.append(f"{type_name(back)}__{plain}")
    return next((each for each in names if each in manifest.graph_attrs), names[0])


def find_categories(
    manifest: Manifest, edge_attr: str | Sequence[str] | None = None
) -> Iterator[tuple[AnyType, Category]]:  # fmt: skip
    """Yield the columns of categories of all node types, and those among the attributes ``edge_attr`` of edge types.

    Embeddings have their default width. Raises ``SettingsError`` as ``edge_columns``.
    """

    def column(of: AnyType, name: str, attr: AttrSpec, at: int = 0) -> Iterator[tuple[AnyType, Category]]:
        texts = manifest.graph_attrs.get(texts_name(manifest, of, name))
        if texts is not None and len(attr.shape) == 1 and attr.dtype.startswith(("int", "uint")):
            count = texts.shape[0]
            yield of, Category(name, count, min(50, (count + 1) // 2), at=at)

    for of, spec in manifest.nodes.items():
        for name, attr in spec.attrs.items():
            if name != "y":
                yield from column(of, name, attr)
    for edge_type, specs in edge_columns(manifest, edge_attr).items():
        at = 0
        for name, attr in specs.items():
            yield from column(edge_type, name, attr, at)
            at += math.prod(attr.shape[1:])


def categories_of(
    manifest: Manifest, dims: Mapping[str, int] | None = None, edge_attr: str | Sequence[str] | None = None
) -> dict[AnyType, tuple[Category, ...]]:
    """Find the columns of categories of a graph: ``categories`` of its tables.

    Args:
        manifest: Manifest of the graph: ``graph.manifest``, or ``gnnfleet.read_manifest(folder)``.
        dims: Width of the embeddings of a column, by its name (``region``, ``customer.region``, or
            ``user__rates__item.channel``); 0: left out. Default: half the number of categories, rounded up, at most
            50.
        edge_attr: Edge attributes that blocks get as ``edge_attr``; those that are columns of categories are found,
            too. Default: those of nodes only.

    Returns:
        The columns by node type and edge type, for ``CategoryEmbeddings``; only types that have some.

    Raises:
        SettingsError: ``dims`` names no column, or a width is out of range; a column has more than 100,000 categories;
            no edge type has an attribute of ``edge_attr``.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        for of, columns in gf.nn.categories_of(graph.manifest).items():
            print(of, [column.name for column in columns])
        ```
    """
    found: dict[AnyType, list[Category]] = {}
    known: dict[str, str] = {}
    given = dict(dims or {})
    for of, column in find_categories(manifest, edge_attr):
        name = f"{type_name(of)}.{column.name}"
        dim = given.get(name, given.get(column.name, column.dim))
        known |= {column.name: name, name: name}
        if column.count > _MOST and dim:
            raise SettingsError(
                f"categories: {column.name} of {type_name(of)} has {column.count:,} different values, more than "
                f"{_MOST:,}: make it a node type of its own, whose nodes have trainable rows, or set category_dims: "
                f"{{{column.name}: 0}}"
            )
        if dim or not isinstance(of, str):  # blocks have the codes of all columns of ``edge_attr``
            found.setdefault(of, []).append(replace(column, dim=dim))
    for name, dim in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            there = ", ".join(sorted({*known.values()})) or "none"
            hint = f"did you mean {near[0]!r}?" if near else f"there is {there}"
            raise SettingsError(
                f"category_dims: no node type, and no edge_attr, has a column of categories {name!r}; {hint}"
            )
        if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim <= _WIDEST:
            raise SettingsError(f"category_dims: {name} is {dim!r}; it must be a whole number from 0 to {_WIDEST:,}")
    return {of: tuple(columns) for of, columns in found.items()}


class CategoryEmbeddings(nn.Module):
    """Embeddings of columns of categories, appended to the features of nodes and edges.

    A missing value, and a code that is out of range, have a row of their own, which is 0 at first.

    Args:
        categories: Columns by node type and edge type, from ``categories_of``.

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
                if not column.dim:
                    continue
                table = nn.Embedding(column.count + 1, column.dim)
                table.weight.data[0] = 0
                self.tables[table_name(of, column.name)] = table
        self._rows: dict[str, Tensor] = {}  #: int64, row of each code, where the graph has codes of its own

    @property
    def names(self) -> dict[NodeType, tuple[str, ...]]:
        """Names of the columns by node type, as ``LoaderSettings.categories`` takes them."""
        every = self.categories.items()
        return {of: tuple(column.name for column in columns) for of, columns in every if isinstance(of, str)}

    def width(self, of: AnyType) -> int:
        """Return the width of the embeddings of all columns of a type together."""
        return sum(column.dim for column in self.categories.get(of, ()))

    def adopt(self, texts: Mapping[AnyType, Sequence[Sequence[str]]]) -> None:
        """Read the codes of another graph, whose columns have other categories.

        ``texts``: the categories of each column in the order of their codes, by type. Those that this model does not
        know are treated as missing.
        """
        for of, columns in self.categories.items():
            for column, new in zip(columns, texts[of], strict=True):
                row = {text: number for number, text in enumerate(column.texts, start=1)}
                if column.texts and tuple(new) != column.texts:
                    self._rows[table_name(of, column.name)] = torch.tensor([0, *(row.get(text, 0) for text in new)])

    def rows(self, of: AnyType, codes: Tensor) -> Tensor:
        """Return embeddings, float32 [n, width]. codes: whole numbers [n, columns], -1 for missing values."""
        found = [torch.empty(len(codes), 0, device=codes.device)]
        for number, column in enumerate(self.categories[of]):
            if not column.dim:
                continue
            key, at = table_name(of, column.name), codes[:, number].long() + 1
            if (mapped := self._rows.get(key)) is not None:
                at = mapped.to(at.device)[torch.where((at < 0) | (at >= len(mapped)), 0, at)]
            found.append(self.tables[key](torch.where((at < 0) | (at > column.count), 0, at)))
        return torch.cat(found, 1)

    def forward(self, batch: B) -> B:
        """Return a batch of ``BatchLoader`` whose ``x`` has the embeddings, after the features, and so its blocks."""
        if not self.categories:
            return batch
        if isinstance(batch, Batch):
            x = self._of_nodes({HOMO_NODE: batch.x}, {HOMO_NODE: batch.categories})[HOMO_NODE]
            plain = tuple(self.blocks({HOMO_EDGE: block})[HOMO_EDGE] for block in batch.blocks)
            return replace(batch, x=x, blocks=plain)
        typed = tuple(self.blocks(blocks) for blocks in batch.blocks)
        return replace(batch, x=self._of_nodes(batch.x, batch.categories), blocks=typed)

    def _of_nodes(
        self, x: Mapping[NodeType, Tensor], codes: Mapping[NodeType, Tensor | None]
    ) -> dict[NodeType, Tensor]:
        found = dict(x)
        for of in self.names:
            own = codes[of]
            assert own is not None, "the loader gathers categories"
            found[of] = self._appended(of, x.get(of), own)
        return found

    def blocks(self, blocks: Mapping[EdgeType, Block]) -> dict[EdgeType, Block]:
        """Return the blocks of a layer whose ``edge_attr`` has embeddings in place of codes, as ``edges``."""
        found = dict(blocks)
        for of, block in blocks.items():
            if of in self.categories and block.edge_attr is not None:
                values = self.edges(of, block.edge_attr)
                found[of] = replace(block, edge_attr=values if values.shape[1] else None)
        return found

    def edges(self, of: EdgeType, values: Tensor) -> Tensor:
        """Return the features of edges with embeddings in place of codes, float32 [e, numbers + width].

        values: numbers and codes [e, columns], as in ``Block.edge_attr``. The embeddings come after the numbers.
        """
        places = [column.at for column in self.categories.get(of, ())]
        if not places:
            return values
        numbers = [values[:, a:b] for a, b in zip([0, *(at + 1 for at in places)], [*places, None], strict=True)]
        return torch.cat([*numbers, self.rows(of, torch.stack([values[:, at] for at in places], 1))], 1)

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

    def _appended(self, of: AnyType, x: Tensor | None, codes: Tensor) -> Tensor:
        rows = self.rows(of, codes)
        return rows if x is None else torch.cat([x, rows], 1)


def table_name(of: AnyType, name: str) -> str:
    """Return the name of the module with the embeddings of the column ``name`` of a type."""
    return f"{type_name(of)}__{name}".replace(".", "#")  # torch allows no "." in the name of a module
