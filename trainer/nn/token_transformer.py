"""A transformer over tokens: each seed is a sequence of the nodes around it, which attend to each other.

As in Zhao et al., "Gophormer: Ego-Graph Transformer for Node Classification" (2021), and Chen et al., "NAGphormer: A
Tokenized Graph Transformer for Node Classification in Large Graphs" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.core.batch import AnyBatch, Block, Tokens
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, EdgeType, NodeType, node_salt
from trainer.nn.categories import CategoryEmbeddings
from trainer.nn.graph_facts import GraphFacts, layer_needs
from trainer.nn.hetero_layers import NodeTensors
from trainer.nn.hetero_models import HeteroShape, InputRows
from trainer.nn.kernels.dropout import edge_ids, hash_dropout, mix_tensor, signed
from trainer.nn.kernels.precision import in_own_precision
from trainer.nn.sharded_embedding import Embeddings

_FARTHEST = 15  #: larger distances count as this

_SMALLEST = 1e-6  #: smaller scores count as this


def seed_tokens(
    blocks: Sequence[Block | Mapping[EdgeType, Block]], n_id: Mapping[NodeType, Tensor], seeds: NodeType, count: int,
    most: int = 128,
) -> Tokens:  # fmt: skip
    """Return the nodes around each seed as a sequence: first the seed, then the others by distance, then by score.

    A node occurs once for each seed, at its smallest distance. Its score is the highest product of the scores of the
    edges of a way of this length; edges that were drawn have 1. Of nodes of equal distance and score, a hash of
    their ids decides. The sequence of a seed does not depend on the other seeds of a batch.

    Args:
        blocks: The blocks of a batch, ``batch.blocks``.
        n_id: Original ids of the batch's nodes, by node type. Other types are left out.
        seeds: Type of the seeds, which are the first nodes of this type.
        count: Number of seeds.
        most: Longest sequence; the nearest and best nodes are kept.

    Shapes:
        - ``n_id``: int64 ``[n]`` per type
        - **output:** ``Tokens`` of shape ``[count, k]``, k ≤ ``most``. ``node`` counts the nodes of all types in
          ``n_id``, one type after the other, and ``types`` the types.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        batch = next(iter(gf.DistNeighborLoader(graph, [10, 5], "train", batch_size=32)))
        tokens = gf.nn.seed_tokens(batch.blocks, {"node": batch.n_id}, "node", batch.batch_size)
        rows = batch.x[tokens.node]  # [32, k, num_features]
        ```
    """
    device, types = n_id[seeds].device, list(n_id)
    sizes = torch.tensor([len(n_id[of]) for of in types])
    total, first = int(sizes.sum()), dict(zip(types, (sizes.cumsum(0) - sizes).tolist(), strict=True))
    # A token is a pair of a seed and a node, numbered seed * total + node.
    new = torch.arange(count, device=device) * (total + 1) + first[seeds]
    new_scores, new_hops = torch.ones(count, device=device), torch.zeros_like(new)
    known, scores, hops = new, new_scores, new_hops
    for layer in reversed(blocks):
        met, met_scores, met_hops = [new[:0]], [new_scores[:0]], [new_hops[:0]]
        for (source, _, target), block in ({HOMO_EDGE: layer} if isinstance(layer, Block) else layer).items():
            if source not in first or target not in first:
                continue
            node = new % total - first[target]
            here = ((node >= 0) & (node < block.num_dst)).nonzero().flatten()
            begin, end = block.indptr[node[here]].long(), block.indptr[node[here] + 1].long()
            each = here.repeat_interleave(end - begin)  # for each edge of these nodes, the token from which it leads
            place = torch.arange(len(each), device=device)
            place += (end - (end - begin).cumsum(0)).repeat_interleave(end - begin)
            met.append(new[each] // total * total + first[source] + block.indices[place])
            met_scores.append(new_scores[each] * (1 if block.edge_weight is None else block.edge_weight[place]))
            met_hops.append(new_hops[each] + (1 if block.hops is None else block.hops[place]))
        found, at = torch.cat(met).unique(return_inverse=True)
        best = torch.zeros(len(found), device=device).scatter_reduce(0, at, torch.cat(met_scores), "amax")
        nearest = torch.full_like(found, _FARTHEST).scatter_reduce(0, at, torch.cat(met_hops), "amin")
        fresh = ~torch.isin(found, known)
        new, new_scores, new_hops = found[fresh], best[fresh], nearest[fresh]
        known, scores, hops = torch.cat([known, new]), torch.cat([scores, new_scores]), torch.cat([hops, new_hops])

    # Sort the tokens of each seed, the least important order first.
    hashes = torch.cat([mix_tensor(ids ^ signed(node_salt(of))) for of, ids in n_id.items()])
    order = hashes[known % total].argsort()
    for values in (-scores, hops, known // total):
        order = order[values[order].argsort(stable=True)]
    known, scores, hops = known[order], scores[order], hops[order]
    lengths = torch.bincount(known // total, minlength=count)
    place = torch.arange(len(known), device=device) - (lengths.cumsum(0) - lengths)[known // total]
    kept = place < most
    width = min(most, int(lengths.max())) if count else 1

    def padded(values: Tensor) -> Tensor:
        at = known[kept] // total, place[kept]
        return values.new_zeros(count, width).index_put_(at, values[kept])

    node = padded(known % total)
    kind = torch.arange(len(types), device=device).repeat_interleave(sizes.to(device))
    return Tokens(node, padded(torch.ones_like(known).bool()), padded(scores), padded(hops), kind[node])


class TokenTransformer(nn.Module):
    """A transformer encoder over sequences of nodes, that returns a row for each seed: that of its own token.

    A token is the row of a node plus embeddings of its type and of its distance from the seed, and a linear map of the
    logarithm of its score. Layers are normalised before attention, and before a network of four times the width with
    GELU (Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020).

    Args:
        width: Width of rows.
        heads: Attention heads; they divide ``width``.
        num_layers: Number of layers.
        num_types: Number of node types.
        dropout: Dropout probability of what each half of a layer adds.

    Shapes:
        - ``rows``: float ``[n, width]``, rows of the nodes of a batch
        - ``tokens``: ``Tokens`` of shape ``[seeds, k]``; the first token is the seed
        - ``ids``: int64 ``[seeds, k]``, from which dropout masks are drawn with ``key``; default: as torch draws
        - **output:** float ``[seeds, width]``

    Raises:
        SettingsError: ``heads`` does not divide ``width``.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        graph = gf.open("parts")
        batch = next(iter(gf.DistNeighborLoader(graph, [10, 5], "train", batch_size=32)))
        tokens = gf.nn.seed_tokens(batch.blocks, {"node": batch.n_id}, "node", batch.batch_size)
        inputs = torch.nn.Linear(graph.num_features, 64)
        model = gf.nn.TokenTransformer(64, heads=4, num_layers=2)
        rows = model(inputs(batch.x), tokens)  # [32, 64]
        ```
    """

    def __init__(self, width: int, heads: int, num_layers: int, num_types: int = 1, dropout: float = 0.0):
        super().__init__()
        if width % heads:
            raise SettingsError(f"{heads} heads do not divide the width {width} of a token; change one of them")
        self.types, self.hops = nn.Embedding(num_types, width), nn.Embedding(_FARTHEST + 1, width)
        for table in (self.types, self.hops):
            nn.init.normal_(table.weight, std=0.02)
        self.score = nn.Linear(1, width, bias=False)
        self.layers = nn.ModuleList(_Layer(width, heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, rows: Tensor, tokens: Tokens, ids: Tensor | None = None, key: int = 0) -> Tensor:
        h = rows[tokens.node] + self.hops(tokens.hops.clamp(max=_FARTHEST))
        h = h + self.types(torch.zeros_like(tokens.node) if tokens.types is None else tokens.types)
        h = h + self.score(tokens.scores.clamp(min=_SMALLEST).log()[..., None])
        for number, layer in enumerate(self.layers, start=1):
            queries = 1 if number == len(self.layers) else h.shape[1]  # only the seed's row of the last layer is read
            h = layer(h, tokens.mask, queries, ids, key, number)
        return self.norm(h[:, 0])  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        # A bias of keys changes nothing, and one of values adds up with that of ``out``.
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor, mask: Tensor, queries: int, ids: Tensor | None, key: int, number: int) -> Tensor:
        """Return the rows of the first ``queries`` tokens of each sequence, float [seeds, queries, width].

        ``number``: of the layer. Other arguments as of ``TokenTransformer``.
        """

        def by_head(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def dropped(x: Tensor, half: int) -> Tensor:
            if ids is None:
                return functional.dropout(x, self.dropout, self.training)
            at = ids[:, :queries].flatten()
            return hash_dropout(x.flatten(0, 1), at, self.dropout, key, 2 * number + half, self.training).view_as(x)

        x = self.norms[0](h)
        keys, values = self.key_value(x).chunk(2, -1)
        found = functional.scaled_dot_product_attention(
            by_head(self.query(x[:, :queries])), by_head(keys), by_head(values), mask[:, None, None]
        )
        h = h[:, :queries] + dropped(self.out(found.transpose(1, 2).flatten(2)), 0)
        return h + dropped(self.narrow(functional.gelu(self.wide(self.norms[1](h)))), 1)


class TokenModel(nn.Module):
    """The bundled model ``token-transformer``: ``InputRows``, a ``TokenTransformer``, and a linear output layer."""

    needs_degree = False

    def __init__(
        self, facts: GraphFacts, shape: HeteroShape, heads: int, num_layers: int, most: int,
        embeddings: Embeddings | None,
    ):  # fmt: skip
        """``shape.num_layers``: number of hops. ``most``: longest sequence of a seed."""
        super().__init__()
        if {*facts.edge_dims.values()} - {1} or any(not isinstance(of, str) for of in facts.categories):
            raise SettingsError(
                "edge_attr: token-transformer reads one number per edge, as the score of the neighbour, and no column "
                "of categories"
            )
        self.target, self.targets, self.shape, self.precision = facts.target, facts.targets, shape, shape.precision
        self.most, self.outputs = most, facts.num_classes or shape.hidden
        self.read = layer_needs(facts.node_types, facts.edge_types, facts.targets, shape.num_layers)[0].sources
        self.inputs = InputRows(facts, self.read, shape.hidden, embeddings)
        self.timed = self.inputs.timed  #: node types of which batches must have ``age``
        self.transformer = TokenTransformer(shape.hidden, heads, num_layers, len(self.read), shape.dropout)
        self.head = nn.Linear(shape.hidden, facts.num_classes) if facts.num_classes else nn.Identity()
        self.categories = CategoryEmbeddings({of: some for of, some in facts.categories.items() if of in self.read})

    def forward(self, batch: AnyBatch) -> Tensor:
        """Return the output for the seeds, float [num_seeds, outputs]."""
        return self.seed_rows(batch)[self.target][: batch.num_seeds]

    def layer_stack(self) -> None:
        """Return None: each node is computed from tokens of its own, not layer by layer."""

    @in_own_precision
    def seed_rows(self, batch: AnyBatch) -> NodeTensors:
        """Return the output for the seed nodes of each of ``targets``: float [n, outputs]."""
        typed = self.categories(batch.typed())
        # Dropout masks depend on the ids of nodes, and of seed and node, and therefore not on the number of ranks.
        salted = {of: typed.n_id[of] ^ signed(node_salt(of)) for of in self.read}
        x = {
            of: hash_dropout(rows, salted[of], self.shape.input_dropout, batch.key, 0, self.training)
            for of, rows in typed.x.items()
            if of in self.read
        }
        found = self.inputs(replace(typed, x=x))
        blocks = [
            {of: block if block.edge_attr is None else replace(block, edge_weight=block.edge_attr[:, 0])
             for of, block in layer.items()}
            for layer in typed.blocks
        ]  # fmt: skip
        rows, ids = torch.cat([found[of] for of in self.read]), torch.cat([*salted.values()])
        out = {}
        for of in self.targets:
            n_id = {kind: typed.n_id[kind] for kind in self.read}
            tokens = seed_tokens(blocks, n_id, of, typed.num_nodes[of][0], self.most)
            pairs = edge_ids(ids[tokens.node[:, :1]], ids[tokens.node])
            out[of] = self.head(self.transformer(rows, tokens, pairs, batch.key))
        return out
