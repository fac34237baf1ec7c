"""Link prediction: an encoder on sampled neighbourhoods, evaluated by ranking unseen links against 1,000 negatives.

    python -m trainer partition make --dataset synthetic-hetero --option hold_out=paper__cites__paper --out parts/links
    python examples/link_prediction.py --parts parts/links --relation paper__cites__paper
    python launch.py --config templates/link_prediction.yml -- python examples/link_prediction.py

The dataset option hold_out removes some links from the edges, for validation and test, so message passing never uses
them. The links of a training batch are edges of the graph; exclude="both" hides them and their reverse edges while this
batch is sampled. Works with homogeneous and heterogeneous graphs.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from common import arguments, divisor, numbers, opened, say, total
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn.module_dict import ModuleDict

import gnnfleet as gf

DECODERS = {
    "dot": lambda dim: gf.nn.DotProduct(),
    "distmult": lambda dim: gf.nn.DistMult(1, dim),
    "mlp": lambda d: gf.nn.MLPDecoder(d, d),
}
NEGATIVES = 1000  #: number of negatives per evaluated link
SHARED = 32  #: negatives per link in training; links share them, because every drawn node needs a sampled neighbourhood


class Model(nn.Module):
    """An encoder of GraphSAGE layers per edge type, and a decoder that scores links."""

    def __init__(self, graph, relation, hidden, fanouts, dropout, decoder):
        super().__init__()
        self.source, self.target, self.dropout = relation[0], relation[2], nn.Dropout(dropout)
        needs = layer_needs(graph.manifest, {self.source, self.target}, len(fanouts))
        widths = {of: spec.attrs["x"].shape[1] for of, spec in graph.manifest.nodes.items() if "x" in spec.attrs}
        self.lins = ModuleDict({of: nn.Linear(widths[of], hidden) for of in needs[0].sources if of in widths})
        self.layers = nn.ModuleList(gf.nn.HeteroSAGEConv(need, hidden, hidden) for need in needs)
        self.as_source, self.as_target = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.decoder = DECODERS[decoder](hidden)

    def forward(self, batch, rows):
        """Return the scores of the links, [n], and of their negatives, [n, SHARED].

        The batch has one negative target per link. The negatives of a link combine its source with its own negative
        target and with those of the next SHARED - 1 links.
        """
        src, dst = self.encode(batch, rows)
        src, ends = src[nodes(batch, self.source).src_index], nodes(batch, self.target)
        following = (torch.arange(len(src))[:, None] + torch.arange(SHARED)) % len(src)
        right, wrong = dst[ends.dst_pos_index], dst[ends.dst_neg_index[following]]
        return self.decoder.score(src, right), self.decoder.score(src[:, None], wrong)

    def encode(self, batch, rows):
        """Return embeddings of a batch's source and target nodes. ``rows``: trainable rows of input nodes by type."""
        x = dict(rows)
        for of, lin in self.lins.items():
            x[of] = lin(nodes(batch, of).x.float()) + x.get(of, 0)
        for number, (layer, blocks) in enumerate(zip(self.layers, batch.blocks, strict=True)):
            hop = len(self.layers) - number  # the targets are the nodes found before the layer's hop
            known = {of: sum(nodes(batch, of).num_sampled_nodes[:hop]) for of in layer.need.targets}
            x = {of: self.dropout(h.relu()) for of, h in x.items()}
            x = layer(blocks if isinstance(blocks, dict) else {gf.HOMO_EDGE: blocks}, x, known)
        return self.as_source(x[self.source]), self.as_target(x[self.target])


def layer_needs(manifest, wanted, num_layers):
    """Return the node and edge types that each layer needs, if the last layer computes the types ``wanted``."""
    needs = []
    for _ in range(num_layers):
        edge_types = tuple(of for of in manifest.edges if of[2] in wanted)
        read = wanted | {of[0] for of in edge_types}
        in_order = [tuple(of for of in manifest.nodes if of in some) for some in (read, wanted)]
        needs.insert(0, gf.nn.LayerNeed(*in_order, edge_types))
        wanted = read
    return needs


def nodes(batch, of):
    """Return the nodes of type ``of`` in a batch; in a homogeneous graph, the batch itself."""
    return batch if of == gf.HOMO_NODE else batch[of]


def main() -> None:
    parser = arguments(
        __doc__, relation="node__to__node", decoder="distmult", embedding_lr=0.01, batch_size=1024, eval_fanouts=""
    )
    parser.add_argument("--embed-all", action="store_true", help="trainable rows also for nodes with features")
    options = parser.parse_args()
    with opened(options.parts) as graph:
        train(graph, options)


def train(graph, options) -> None:
    relation, fanouts, hetero = gf.type_of(options.relation), numbers(options.fanouts), graph.manifest.hetero
    model = Model(graph, relation, options.hidden, fanouts, options.dropout, options.decoder)
    read = model.layers[0].need.sources
    own = {of: graph.manifest.nodes[of].num_nodes for of in read if options.embed_all or of not in model.lins}
    embedding = gf.nn.ShardedEmbedding(own, options.hidden)
    parallel = DistributedDataParallel(model)
    optimizers = [torch.optim.Adam(model.parameters(), lr=options.lr)]
    optimizers += [torch.optim.SparseAdam([embedding.weight], lr=options.embedding_lr)] if own else []
    links = gf.DistLinkNeighborLoader(
        graph, fanouts, (relation, None) if hetero else None, neg_sampling={"mode": "triplet", "amount": 1},
        exclude="both", batch_size=options.batch_size, shuffle=True, drop_last=True,
    )  # fmt: skip

    def rows(batch):
        return embedding.lookup({of: nodes(batch, of).n_id for of in own})

    for epoch in range(options.epochs):
        model.train()
        begin, loss_sum, count = time.monotonic(), 0.0, 0
        for batch in links:
            positive, negative = parallel(batch, rows(batch))
            loss = gf.nn.softmax_loss(positive, negative) * len(positive)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss / divisor(len(positive))).backward()
            embedding.sync_gradients()
            for optimizer in optimizers:
                optimizer.step()
            loss_sum, count = loss_sum + loss.item(), count + len(positive)
        seconds, (loss_sum, count) = time.monotonic() - begin, total(loss_sum, count)
        say(f"epoch {epoch + 1}: loss {loss_sum / count:.4f}, {seconds:.1f} s")
    model.eval()
    src, dst = embed_all(graph, relation, options, lambda batch: model.encode(batch, rows(batch)))
    scores = {"popularity": popularity(links, len(dst)), "model": lambda s, d: model.decoder.score(src[s], dst[d])}
    for split, name in [("val", "model"), ("test", "popularity"), ("test", "model")]:
        found = evaluate(graph.store.graph_attrs[f"{split}_links"], len(dst), scores[name])
        say(f"{split}, {name}: MRR {found.mrr:.4f}, Hits@10 {found.hits[10]:.4f}, AUC {found.auc:.4f}")


def popularity(links, num_nodes):
    """Return a function that scores a link by the number of training links with the same target, as a baseline."""
    count = torch.zeros(num_nodes)
    for some in torch.arange(len(links.dataset)).split(1 << 20):
        _, dst = links.inputs.ends.ends_of(some.numpy())
        count += torch.bincount(torch.from_numpy(dst), minlength=num_nodes)
    return lambda src, dst: count[dst]


@torch.no_grad()
def embed_all(graph, relation, options, encode):
    """Return the embeddings of all nodes of the source type and of the target type, on every rank.

    Each tensor takes nodes * hidden * 4 bytes of memory on every rank. ``encode(batch)`` returns the embeddings of a
    batch's source and target nodes.
    """
    types = dict.fromkeys(relation[::2])
    seeds = dict.fromkeys(types) if graph.manifest.hetero else None
    batches = gf.DistNeighborLoader(graph, numbers(options.eval_fanouts or options.fanouts), seeds, batch_size=2048)
    tables = [torch.zeros(graph.manifest.nodes[of].num_nodes, options.hidden) for of in relation[::2]]
    for batch in batches:
        for table, rows, of in zip(tables, encode(batch), relation[::2], strict=True):
            own = nodes(batch, of)
            table[own.n_id[: own.batch_size]] = rows[: own.batch_size]
    for table in tables:
        dist.all_reduce(table)  # each node is the seed of one rank; the other ranks have zeros
    return tables


@torch.no_grad()
def evaluate(links, num_nodes, score):
    """Return MRR, Hits and AUC of the links: each target is ranked among 1,000 uniformly drawn nodes.

    The drawn nodes are the same for any number of processes. ``score(src, dst)`` returns the scores of links.
    """
    sums, chunks = gf.nn.LinkSums(), torch.from_numpy(links.copy()).split(64, dim=1)
    for number in range(dist.get_rank(), len(chunks), dist.get_world_size()):
        src, dst = chunks[number]
        drawn = torch.Generator().manual_seed(number)
        others = torch.randint(num_nodes, (len(src), NEGATIVES), generator=drawn)
        sums.add(score(src, dst), score(src[:, None], others).masked_fill(others == dst[:, None], -torch.inf))
    dist.all_reduce(sums.sums)
    return sums.result()


if __name__ == "__main__":
    main()
