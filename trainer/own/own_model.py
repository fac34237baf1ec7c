"""A user's model as the trainer runs it: from a batch of blocks to the rows of its seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data, HeteroData

from trainer.core.batch import AnyBatch, Batch, Block, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.nn.categories import CategoryEmbeddings
from trainer.nn.graph_facts import GraphFacts, layer_needs
from trainer.nn.hetero_models import InputRows
from trainer.nn.kernels.precision import PRECISIONS, in_own_precision
from trainer.nn.models import ModelSettings
from trainer.nn.sharded_embedding import Embeddings
from trainer.own.blockwise import BlockwiseStack, edge_index_of, prepare, runs_on_blocks
from trainer.own.dropout import KeyedDropout, RowsOf, edges_by_ends, salted, with_loops
from trainer.own.model_class import constructor_args, forward_names, in_words, load_class, takes_types
from trainer.own.unrolled import differ_by_depth, unrolled

Rows = dict[NodeType, Tensor]

_SELF = "gnnfleet_self"  #: relation of the edges that ``to_hetero`` needs at types without in-edges


class _OwnSettings(ModelSettings, Protocol):
    """Settings from which a user's model is built. ``TrainSettings`` implements this protocol."""

    @property
    def model_args(self) -> Mapping[str, Any] | None: ...
    @property
    def edge_attr(self) -> tuple[str, ...] | None: ...
    @property
    def eval_fanouts(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True)
class Call:
    """How a model is called."""

    name: str  #: of the user's class
    names: tuple[str, ...]  #: arguments of ``forward``
    typed: bool  #: whether its arguments are mappings by type
    converted: bool  #: whether it is a model for one type, converted by ``to_hetero``
    on_blocks: bool  #: whether it runs layer by layer on blocks
    as_weight: bool  #: whether edge features are passed as ``edge_weight`` [E], not as ``edge_attr`` [E, d]
    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]


@contextmanager
def _single_rows(norms: Sequence[Any]) -> Iterator[None]:
    """Let norms use their running statistics for a single row, which torch refuses: a share may have only one node."""

    def begin(norm: Any, args: tuple[Tensor]) -> None:
        norm.alone = bool(norm.training and args and args[0].dim() > 1 and args[0].numel() == args[0].shape[1])
        norm.training = norm.training and not norm.alone

    def end(norm: Any, *_: Any) -> None:
        norm.training = norm.training or norm.alone
        del norm.alone

    hooks = [norm.register_forward_pre_hook(begin) for norm in norms]
    hooks += [norm.register_forward_hook(end, always_call=True) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class OwnModel(nn.Module):
    """Runs a user's model on the batches of the bundled trainer.

    Dropout masks depend on nodes and edges, not on ranks. Other random numbers of torch depend on the step.
    """

    needs_degree = False

    def __init__(
        self, own: nn.Module, call: Call, facts: GraphFacts, precision: torch.dtype, inputs: InputRows | None,
        embeddings: Embeddings | None,
    ):  # fmt: skip
        """``inputs``: makes rows of equal width of all node types. ``embeddings``: rows of types without features."""
        super().__init__()
        self.own, self.call, self.inputs, self.precision = own, call, inputs, precision
        self.targets, self.target, self.outputs = facts.targets, facts.target, facts.num_classes
        self.embeddings = None if inputs is not None else embeddings
        read = {*call.node_types, *call.edge_types}
        self.categories = CategoryEmbeddings({of: some for of, some in facts.categories.items() if of in read})
        self.other_fanouts = True  #: whether hops may have different fanouts; comparing them waits for a GPU
        self.by_depth = False  #: whether any batch must be unrolled, found by the test batch
        self.unused: list[str] = []  #: weights that the test batch has given no gradient
        self._drops: list[RowsOf | None] | None = None
        self._norms = [each for each in own.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]

    def forward(self, batch: AnyBatch) -> Tensor:
        """Return the model's output for the seeds, float [num_seeds, outputs]."""
        return self.seed_rows(batch)[self.target][: batch.num_seeds]

    @in_own_precision
    def seed_rows(self, batch: AnyBatch) -> Rows:
        """Return the model's output for the seed nodes of each of ``targets``, float [n, outputs]."""
        typed = self.categories(batch.typed())
        rows = self.input_rows(typed)
        seeds = {of: typed.num_nodes[of][0] for of in self.targets}
        if not any(seeds.values()):  # this rank has no seeds in the step
            nothing = sum(weight.reshape(-1)[:0].sum() for weight in self.parameters())
            device = next(iter(rows.values())).device
            return {of: torch.zeros(0, self.outputs, device=device) + nothing for of in self.targets}
        if self._drops is not None and not self.call.on_blocks:  # not the test batch
            read = [of for of in self.call.edge_types if of[1] != _SELF]
            if self.by_depth or (self.other_fanouts and differ_by_depth(typed, read)):
                typed, rows = unrolled(typed, rows, read)
        arguments = self._arguments(typed, rows)
        with self._randomness(typed), _single_rows(self._norms if self.training else ()):
            out = self.own(**arguments)
        found = dict(out) if isinstance(out, Mapping) else {self.target: out}
        for of, count in seeds.items():
            own = found.get(of)
            if not isinstance(own, Tensor) or own.dim() != 2 or own.shape[1] != self.outputs or len(own) < count:
                shape = list(own.shape) if isinstance(own, Tensor) else type(own).__name__
                raise SettingsError(
                    f"model: forward of {self.call.name} must return rows of all nodes of the batch, or of "
                    f"its seeds{f', by node type, also of {of}' if len(seeds) > 1 else ''}: [n, {self.outputs}]; it "
                    f"returns {shape}"
                )
        return {of: found[of][:count] for of, count in seeds.items()}

    def input_rows(self, batch: HeteroBatch) -> Rows:
        """Return the input of the model for each node type, float [n, f]. Collective if nodes have trainable rows.

        ``batch``: with embeddings of categories.
        """
        if self.inputs is not None:
            return self.inputs(batch)  # type: ignore[no-any-return]
        rows = {of: x for of, x in batch.x.items() if of in self.call.node_types}
        if self.embeddings is not None:
            rows |= self.embeddings.lookup({of: batch.n_id[of] for of in self.embeddings.num_nodes})
        return rows

    @property
    def reads_tensors(self) -> bool:
        """Whether the user's own module can be called without this one, with the features and edges of a graph."""
        return not self.call.typed and self.embeddings is None and not self.categories.categories

    def layer_stack(self) -> BlockwiseStack | None:
        """Return the model's layers, for inference layer by layer; None if it cannot say them."""
        if not self.call.on_blocks or getattr(self.own, "jk_mode", None) is not None:
            return None
        return BlockwiseStack(
            self.own, self.categories, lambda batch: self.input_rows(batch)[HOMO_NODE], self.call.as_weight
        )

    def check(self, batch: AnyBatch) -> None:
        """Run the model on a batch, with gradients, and leave weights and buffers as they were.

        Raises ``SettingsError`` if the model fails, or its result has another shape than [n, outputs].
        """
        name, before = self.call.name, {key: value.clone() for key, value in self.own.named_buffers()
                                                  if not isinstance(value, nn.UninitializedBuffer)}  # fmt: skip
        owner = self if self.inputs is None else self.inputs
        embeddings, owner.embeddings = owner.embeddings, owner.embeddings and _TestRows(owner.embeddings)
        try:
            self.train()
            with torch.enable_grad():
                out = self.seed_rows(batch)
                total = torch.stack([rows.sum() for rows in out.values()]).sum()
                if not total.requires_grad:
                    raise SettingsError(f"model: the output of {name} depends on no weights, so it cannot be trained")
                total.backward()  # type: ignore[no-untyped-call]
            self.by_depth = not self.call.on_blocks and self._depends_on_other_seeds(batch)
        except SettingsError:
            raise
        except (Exception, SystemExit) as error:  # the user's code runs
            raise SettingsError(f"model: {name} fails on a small batch: {in_words(error)}") from error
        finally:
            owner.embeddings = embeddings
        unknown = [key for key, weight in self.named_parameters() if isinstance(weight, nn.UninitializedParameter)]
        if unknown:
            raise SettingsError(
                f"model: {name} never uses {unknown[0].removeprefix('own.')}, so its shape is unknown; leave it out"
            )
        self.unused = [key for key, weight in self.named_parameters() if weight.grad is None]
        with torch.no_grad():
            for key, value in self.own.named_buffers():
                if key in before:
                    value.copy_(before[key])
        self.zero_grad(set_to_none=True)

    def _depends_on_other_seeds(self, batch: AnyBatch) -> bool:
        """Return whether the rows of a seed depend on which nodes of the batch other seeds have expanded.

        So they do with convolutions that divide by degrees (GCN), and with more layers than hops.
        """
        found, precision, others = [], self.precision, self.other_fanouts
        self.eval()
        try:
            self.precision, self.other_fanouts = torch.float32, False
            for self.by_depth in (False, True):
                torch.manual_seed(0)  # for rows of ``_TestRows``
                with torch.no_grad():
                    found.append(self.seed_rows(batch))
        finally:
            self.precision, self.other_fanouts = precision, others
            self.train()
        plain, unrolled = found
        return any(not torch.allclose(rows, unrolled[of], 1e-4, 1e-5, equal_nan=True) for of, rows in plain.items())

    def _arguments(self, batch: HeteroBatch, rows: Rows) -> dict[str, Any]:
        """Return the arguments of the model's ``forward``. ``rows``: its input, by node type.

        ``blocks[0]`` has all edges, except for a model on blocks.
        """
        call = self.call
        if call.on_blocks:
            blocks = tuple(blocks[HOMO_EDGE] for blocks in batch.blocks)
            return {
                "x": rows[HOMO_NODE], "edge_index": None, "num_sampled_nodes_per_hop": blocks,
                "edge_weight" if call.as_weight else "edge_attr": self._values(blocks[0]),
            }  # fmt: skip
        outer = {of: block for of, block in batch.blocks[0].items() if of in call.edge_types}  # has all edges
        indices = {of: edge_index_of(block) for of, block in outer.items()}
        for of in call.edge_types:
            if of[1] == _SELF:
                indices[of] = torch.arange(len(rows[of[0]]), device=rows[of[0]].device).expand(2, -1)
        nodes = {of: _steps(batch.num_nodes[of]) for of in call.node_types}
        edges: dict[EdgeType, list[int]] = {}
        if {"batch", "num_sampled_edges", "num_sampled_edges_dict"} & set(call.names):  # reads numbers from the device
            edges = {
                of: _steps([int(block.indptr[min(count, block.num_dst)]) for count in batch.num_nodes[of[2]][:-1]])
                for of, block in outer.items()
            }
        values = {of: self._values(block) for of, block in outer.items() if block.edge_attr is not None}
        by_type: dict[str, Any] = {
            "x": {of: rows[of] for of in call.node_types if of in rows}, "edge_index": indices,
            "edge_weight" if call.as_weight else "edge_attr": values or None,
            "num_sampled_nodes": nodes, "num_sampled_edges": edges or None,
        }  # fmt: skip
        if not call.typed:
            by_type = {name: next(iter(of.values())) if of else None for name, of in by_type.items()}
        by_type["batch_size"] = batch.num_nodes[self.target][0]
        if call.names == ("batch",):
            return {"batch": _as_pyg(by_type, call.typed, batch)}
        return {name: by_type.get(name.removesuffix("_dict")) for name in call.names}

    def _values(self, block: Block) -> Tensor | None:
        attr = block.edge_attr
        return attr.flatten() if attr is not None and self.call.as_weight else attr

    def _randomness(self, batch: HeteroBatch) -> Any:
        """Return a context in which dropout is drawn by ids, and torch's other random numbers by the batch's key."""
        if not self.training:
            return _NoDropout() if self.call.converted else nullcontext()
        torch.manual_seed(batch.key & ((1 << 63) - 1))  # for random numbers that the model itself draws
        rows: dict[RowsOf, tuple[int, Callable[[], Tensor]]] = {}
        for of, totals in batch.num_nodes.items():
            for hop, count in reversed([*enumerate(totals)]):  # all nodes first
                rows["nodes", of, hop] = count, _ids_of_nodes(batch, of, count)
        layers = batch.blocks if self.call.on_blocks else batch.blocks[:1]
        for number, blocks in enumerate(layers):
            for edge_type, block in blocks.items():
                wanted = [what for what in ("edges", "loops", "all loops") if self._drops is None
                          or (what, edge_type, number) in self._drops]  # fmt: skip
                if not wanted:
                    continue
                # All edges; or edges without self loops, then a loop for each target, or for each source.
                source, _, target = edge_type
                src, dst = edge_index_of(block)
                edges = partial(edges_by_ends, batch.n_id[source], batch.n_id[target], src, dst)
                if "edges" in wanted:
                    rows["edges", edge_type, number] = len(src), edges
                for what in ("loops", "all loops"):
                    if what in wanted and source == target:
                        others, last = src != dst, block.num_dst if what == "loops" else block.num_src
                        nodes = batch.n_id[target][:last]
                        made = partial(with_loops, edges, others, nodes)
                        rows[what, edge_type, number] = int(others.sum()) + len(nodes), made
        mode = KeyedDropout(rows, batch.key, self._drops)
        if self._drops is None:
            self._drops = mode.found  # of the test batch; the list is filled while the model runs
        return mode


class _NoDropout(KeyedDropout):
    """Leaves out dropout: ``to_hetero`` records ``training=self.training`` as a constant."""

    def __init__(self) -> None:
        super().__init__({}, 0, None)

    def _dropout(self, rows: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return rows


class _TestRows:
    """Random rows in place of the rows of other ranks."""

    def __init__(self, of: Embeddings):
        self.num_nodes, self.dim = of.num_nodes, of.dim

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Rows:
        return {of: torch.randn(len(ids), self.dim) for of, ids in n_id.items()}


def _ids_of_nodes(batch: HeteroBatch, of: NodeType, count: int) -> Callable[[], Tensor]:
    return lambda: salted(batch.n_id[of][:count], of)


def _steps(cumulative: Sequence[int]) -> list[int]:
    return [cumulative[0], *(b - a for a, b in zip(cumulative, cumulative[1:], strict=False))]


def _as_pyg(found: Mapping[str, Any], typed: bool, batch: HeteroBatch) -> Data | HeteroData:
    if not typed:
        plain = {key: value for key, value in found.items() if value is not None}
        return Data(**plain, n_id=batch.n_id[HOMO_NODE], input_id=batch.input_id)
    data = HeteroData()
    for of, rows in found["x"].items():
        data[of].x, data[of].n_id, data[of].num_sampled_nodes = rows, batch.n_id[of], found["num_sampled_nodes"][of]
    data[batch.target].batch_size = found["batch_size"]
    for edge_type, index in found["edge_index"].items():
        data[edge_type].edge_index = index
        data[edge_type].num_sampled_edges = found["num_sampled_edges"].get(edge_type)
    for name in ("edge_attr", "edge_weight"):
        for edge_type, value in (found.get(name) or {}).items():
            data[edge_type][name] = value
    return data


def build_own(
    settings: _OwnSettings, facts: GraphFacts, embeddings: Embeddings | None, folders: Sequence[Path] = ()
) -> OwnModel:  # fmt: skip
    """Construct the class that ``settings.model`` names, on the CPU, and run it once on a small batch.

    Initial weights depend on ``settings.seed`` only.

    Args:
        settings: Name of the class, its arguments, and widths.
        facts: Types and widths of the graph; ``num_classes`` is the width of the output.
        embeddings: Trainable rows of node types.
        folders: Where the file of the class is looked for.

    Raises:
        SettingsError: The class cannot be found, constructed or called as the trainer does.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        cls = load_class(settings.model, folders)
        names, layers = forward_names(cls), len(settings.fanouts)
        direct = takes_types(cls, facts.hetero)
        typed = facts.hetero or direct
        need = layer_needs(facts.node_types, facts.edge_types, facts.targets, layers)[0]
        types, edges = need.sources, need.edge_types
        converted = typed and not direct
        if converted:
            ends = {of[2] for of in edges}
            edges = (*edges, *((of, _SELF, of) for of in types if of not in ends))
            inputs: InputRows | None = InputRows(facts, types, settings.hidden, embeddings)
        else:
            inputs = None
        width: Any = settings.hidden if converted else {of: facts.in_dims.get(of, settings.hidden) for of in types}
        edge_dims = [facts.edge_dims[of] for of in edges if of in facts.edge_dims]
        offered = {
            "in_channels": width if typed else width[facts.target],
            "hidden_channels": settings.hidden,
            "out_channels": facts.num_classes,
            "num_layers": layers,
            "metadata": ([*types], [*edges]),
            "edge_dim": edge_dims[0] if edge_dims else None,
            "dropout": settings.dropout,
            "heads": settings.heads,
            "deg": torch.tensor(facts.degrees) if facts.degrees else None,
            "aggregators": ["mean", "min", "max", "std"],
            "scalers": ["identity", "amplification", "attenuation"],
        }
        arguments = constructor_args(cls, offered, settings.model_args or {})
        try:
            own: Any = cls(**arguments)
            blocks = not typed and runs_on_blocks(own)
            # scores of neighbours are edge features, too
            as_weight = bool(edge_dims) and _reads_weight(own, names, settings.edge_attr, edge_dims, facts)
            if converted:
                own = _converted(own, types, edges)
            elif blocks:
                prepare(own)
        except SettingsError:
            raise
        except (Exception, SystemExit) as error:  # the user's code runs
            raise SettingsError(f"model: {cls.__name__} cannot be made: {in_words(error)}") from error
        call = Call(cls.__name__, names, typed, converted, blocks, as_weight, types, edges)
        model = OwnModel(own, call, facts, PRECISIONS[settings.precision], inputs, embeddings)
        model.check(small_batch(facts, layers, typed))
        model.other_fanouts = len({*settings.fanouts, *(settings.eval_fanouts or ())}) > 1
        return model


def _converted(own: nn.Module, types: Sequence[NodeType], edges: Sequence[EdgeType]) -> nn.Module:
    if any(getattr(conv, "add_self_loops", False) for conv in own.modules()):
        raise SettingsError(
            f"model: {type(own).__name__} has convolutions that add self loops, which edges between two types of nodes "
            "cannot have; pass add_self_loops=False to them (for a class of torch_geometric: in model_args)"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names of types; those that do not work raise an error
        made: nn.Module = pyg.to_hetero(own, (list(types), list(edges)))
    for conv in made.modules():
        if isinstance(conv, pyg.PNAConv):
            conv.forward = partial(_on_pair, conv.forward)  # type: ignore[method-assign]
    return made


def _on_pair(forward: Callable[..., Tensor], x: Any, edge_index: Tensor, *more: Any, **named: Any) -> Tensor:
    """Call a convolution for one type with the rows of a source type and of a target type, of equal width."""
    if isinstance(x, Tensor):
        return forward(x, edge_index, *more, **named)
    sources, targets = x
    src, dst = edge_index
    return forward(torch.cat([targets, sources]), torch.stack([src + len(targets), dst]), *more, **named)[
        : len(targets)
    ]


def _reads_weight(
    own: Any, names: Sequence[str], attr: tuple[str, ...] | None, dims: Sequence[int], facts: GraphFacts
) -> bool:
    """Return whether edge features, or without ``attr`` scores of neighbours, are passed as ``edge_weight``.

    Raises ``SettingsError`` if the model reads neither weights nor features of edges, or only a weight, which these
    features are not.
    """
    plain = {name.removesuffix("_dict") for name in names}
    for name in ("edge_weight", "edge_attr"):
        if not getattr(own, f"supports_{name}", True):
            plain.discard(name)
    if not plain & {"edge_weight", "edge_attr", "batch"}:
        given = "edge_attr" if attr else "neighbors"
        raise SettingsError(f"{given}: model {type(own).__name__} does not read edge features or weights")
    categories = sorted(f"{column.name} of {type_name(of)}" for of, columns in facts.categories.items()
                        for column in columns if column.dim and not isinstance(of, str))  # fmt: skip
    one = set(dims) == {1} and not categories
    if "edge_weight" in plain and "edge_attr" not in plain and not one:
        what = f"{categories[0]} is a column of categories" if categories else f"these are {max(dims)} numbers"
        raise SettingsError(
            f"edge_attr: model {type(own).__name__} reads one number per edge, edge_weight, and {what}; name one "
            "attribute of numbers, or use a class that reads edge_attr"
        )
    return "edge_weight" in plain and (
        "edge_attr" not in plain or (one and all("weight" in name for name in attr or ()))
    )


def small_batch(facts: GraphFacts, layers: int, typed: bool) -> AnyBatch:
    """Return a batch of random rows and edges in which all numbers of nodes and edges differ."""
    draw = torch.Generator().manual_seed(0)
    nothing = torch.empty(0, dtype=torch.int64)
    if not typed:
        counts = [101 + 10 * hop for hop in range(layers + 1)]
        degrees = torch.cat([_spread(1000, counts[hop] - (counts[hop - 1] if hop else 0)) for hop in range(layers)])
        hops = torch.arange(layers).repeat_interleave(torch.tensor(_steps(counts[:-1])))
        below = torch.tensor(counts[1:])[hops].repeat_interleave(degrees)
        indices = (torch.rand(len(below), generator=draw) * below).long()
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
        attr = _attr(facts, HOMO_EDGE, len(below), draw)
        blocks = tuple(
            Block(
                indptr[: counts[hop] + 1].int(), indices[: indptr[counts[hop]]].int(), counts[hop + 1],
                None if attr is None else attr[: indptr[counts[hop]]],
            )
            for hop in reversed(range(layers))
        )  # fmt: skip
        x = torch.randn(counts[-1], facts.width_of(facts.target), generator=draw)
        codes = _codes(facts, {facts.target: counts[-1]}).get(facts.target)
        n_id = torch.arange(counts[-1])
        return Batch(0, 1, counts[0], counts[0], n_id, x, None, nothing, blocks, categories=codes)
    totals = {of: 101 + 2 * number for number, of in enumerate(facts.node_types)}
    first = {of: 3 + number if of in facts.targets else 0 for number, of in enumerate(facts.node_types)}
    every = {}
    for number, of in enumerate(facts.edge_types, start=1):
        degrees = _spread(1000 * number, totals[of[2]])
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)]).int()
        indices = torch.randint(totals[of[0]], (1000 * number,), generator=draw).int()
        every[of] = Block(indptr, indices, totals[of[0]], _attr(facts, of, 1000 * number, draw))
    return HeteroBatch(
        step=0, key=1, num_seeds=first[facts.target], global_seeds=first[facts.target], target=facts.target,
        n_id={of: torch.arange(count) for of, count in totals.items()},
        x={of: torch.randn(totals[of], facts.width_of(of), generator=draw) for of in facts.in_dims},
        y=None, input_id=nothing, blocks=(every,) * layers,
        num_nodes={of: (first[of], *[totals[of]] * layers) for of in totals}, categories=_codes(facts, totals),
    )  # fmt: skip


def _attr(facts: GraphFacts, of: EdgeType, count: int, draw: torch.Generator) -> Tensor | None:
    """Return features of edges, random numbers and codes; None: the type has none."""
    if not (width := facts.width_of(of)):
        return None
    attr = torch.rand(count, width, generator=draw)
    for column in facts.categories.get(of, ()):
        attr[:, column.at] = (torch.arange(count) % (column.count + 1) - 1).float()
    return attr


def _codes(facts: GraphFacts, counts: Mapping[NodeType, int]) -> Rows:
    return {
        of: torch.stack([torch.arange(counts[of]) % (column.count + 1) - 1 for column in columns], 1)
        for of, columns in facts.categories.items()
        if isinstance(of, str)
    }


def _spread(total: int, count: int) -> Tensor:
    """Return ``count`` numbers that add up to ``total`` and differ by at most 1."""
    each = torch.full((count,), total // count)
    each[: total % count] += 1
    return each
