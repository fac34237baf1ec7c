"""The settings ``train`` of cluster.yml, which are the options of ``python -m trainer train``."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from trainer.core.fields import ANY, CONTROLS, WORD, Form, setting
from trainer.core.remote_settings import CacheSize

_MODEL = Form(
    rf"\w[\w-]*|(?!-)[^:{CONTROLS}]+\.py:[A-Za-z_]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+",
    "the name of a bundled model, FILE.py:CLASS or PACKAGE.CLASS",
)

#: Names of the bundled models.
MODELS = ("sage", "gcn", "gat", "rgcn", "hgt", "rsage", "lightgcn", "embedding", "token-transformer")

#: Bundled models that read features of edges.
EDGE_MODELS = ("sage", "rsage", "token-transformer")

#: Bundled models that do not read the scores of neighbours by PageRank or walks.
_WITHOUT_SCORES = ("lightgcn", "embedding")

#: Bundled models that divide messages by degrees in the whole graph, which count edges later than a seed.
_OF_DEGREES = ("gcn", "lightgcn")

#: Settings that only some bundled models read, and no class.
_OF_MODELS: Mapping[str, tuple[str, ...]] = {
    "output_heads": ("gat",),
    "activation": tuple(name for name in MODELS if name not in ("hgt", "lightgcn", "embedding", "token-transformer")),
    "input_dropout": tuple(name for name in MODELS if name not in ("lightgcn", "embedding")),
    "attention_dropout": ("gat",),
    "max_tokens": ("token-transformer",),
}


def is_own_model(model: str) -> bool:
    """Return whether ``train.model`` names a class, as ``FILE.py:CLASS`` or ``PACKAGE.CLASS``, not a bundled model."""
    return ":" in model or "." in model


#: Metrics on evaluation splits by task, the default one first; `loss` is another name that `train.early_stop` accepts.
METRICS: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy", "macro_f1", "micro_f1", "roc_auc", "average_precision"),
    "multilabel": ("micro_f1", "accuracy", "macro_f1", "roc_auc", "average_precision"),
    "regression": ("mae", "rmse"),
    "link": ("mrr", "hits@1", "hits@10", "hits@50", "auc"),
}

LOWER_IS_BETTER = ("loss", "mae", "rmse")

#: Metrics of task `link` that are `NAME@K`, for any K; all but hits need `train.eval_negatives: all`.
AT_K = ("hits", "recall", "ndcg", "precision", "map")


_ADAM = "betas eps amsgrad maximize"

#: The optimizers of torch.optim with their arguments, without those that are keys of `train` and those about speed.
#: Left out are those that need a closure, sparse gradients, matrices only, or a wait for the GPU in each step.
OPTIMIZERS: Mapping[str, str] = {
    "Adam": f"{_ADAM} decoupled_weight_decay",
    "AdamW": _ADAM,
    "SGD": "momentum dampening nesterov maximize",
    "RMSprop": "alpha eps momentum centered maximize",
    "Adagrad": "lr_decay initial_accumulator_value eps maximize",
    "Adadelta": "rho eps maximize",
    "Adamax": "betas eps maximize",
    "NAdam": "betas eps momentum_decay decoupled_weight_decay maximize",
    "RAdam": "betas eps decoupled_weight_decay maximize",
    "ASGD": "lambd alpha t0 maximize",
    "Rprop": "etas step_sizes maximize",
}


class TrackerOptions(NamedTuple):
    options: tuple[str, ...]
    package: str  #: the Python package that the lead node needs


#: The trackers; those of ``trainer.track`` have the same names.
TRACKERS: Mapping[str, TrackerOptions] = {
    "tensorboard": TrackerOptions((), "tensorboard"),
    "wandb": TrackerOptions(("project", "entity", "mode"), "wandb"),
    "mlflow": TrackerOptions(("experiment", "uri"), "mlflow-skinny"),
}


@dataclass(frozen=True)
class EarlyStop:
    """When a run ends before `train.epochs`. `early_stop: 3` is short for `early_stop: {patience: 3}`."""

    patience: int = setting("The run ends after this many evaluations on val without an improvement.", at_least=1)
    metric: str | None = setting(
        "What must improve: `loss` or a metric of the task; default: the metric that chooses the best epoch.",
        None,
        form=WORD,
    )
    min_delta: float = setting("An improvement is a change by more than this.", 0.0, at_least=0)


#: The schedules with the keys that only some of them have.
_SCHEDULES: Mapping[str, str] = {
    "constant": "",
    "cosine": "lowest epochs",
    "step": "every factor",
    "plateau": "factor patience metric lowest",
    "one-cycle": "rise lowest epochs",
}


@dataclass(frozen=True)
class Schedule:
    """How the learning rates change, that of trainable rows alike. `schedule: cosine` is short for `{name: cosine}`."""

    name: Literal["constant", "cosine", "step", "plateau", "one-cycle"] = setting(
        "`cosine` falls along a cosine; `step` multiplies by `factor` every few epochs, `plateau` once a metric on val "
        "no longer improves; `one-cycle` rises from 4 % and falls, both along a cosine."
    )
    warmup_steps: int = setting("Steps in which the rate first grows from 0 to its value.", 0, at_least=0)
    warmup_epochs: int = setting("The same in epochs.", 0, at_least=0)
    every: int | None = setting("step: epochs between two changes; default: 10.", None, at_least=1)
    factor: float | None = setting(
        "step, plateau: what the rate is multiplied by; default: 0.1.", None, above=0, below=1
    )
    patience: int | None = setting(
        "plateau: evaluations on val without an improvement before a change; default: 10.", None, at_least=1
    )
    metric: str | None = setting(
        "plateau: what must improve, `loss` or a metric of the task; default: the metric that chooses the best epoch.",
        None,
        form=WORD,
    )
    rise: float | None = setting(
        "one-cycle: share of the steps in which the rate rises; default: 0.3.", None, above=0, below=1
    )
    lowest: float | None = setting(
        "cosine, plateau, one-cycle: lowest rate, as a share of `train.lr`; default: 0.", None, at_least=0, below=1
    )
    epochs: int | None = setting(
        "cosine, one-cycle: epochs until the lowest rate; default: `train.epochs`.", None, at_least=1
    )


#: The ways to choose neighbours, with the keys that only some of them have.
NEIGHBORS: Mapping[str, str] = {
    "fanout": "",
    "top": "",
    "ppr": "alpha eps edge_types direction",
    "walks": "num_walks length restart metapath",
}


@dataclass(frozen=True)
class Neighbors:
    """How neighbours are chosen, as many as `train.fanouts` says. `neighbors: ppr` is short for `{name: ppr}`."""

    name: Literal["fanout", "top", "ppr", "walks"] = setting(
        "`fanout` draws them; `top` takes those of the highest `train.weight_attr`, or without it the latest by "
        "`train.time_attr`; `ppr` those of the highest personalised PageRank; `walks` those that random walks visit "
        "most often (PinSAGE). The last two with all models but lightgcn and embedding, and model classes that read "
        "edge_weight."
    )
    alpha: float | None = setting(
        "ppr: probability that a walk ends before each step; default: 0.15.", None, above=0, below=1
    )
    eps: float | None = setting(
        "ppr: residual per in-edge up to which a vertex is pushed; smaller: more exact and slower; default: 0.0001.",
        None,
        above=0,
        below=1,
    )
    edge_types: tuple[str, ...] | None = setting("ppr: edge types that walks follow; default: all.", None, form=WORD)
    direction: Literal["in", "out", "both"] | None = setting(
        "ppr: `in`: walks go from the target of an edge to its source; `out`: from source to target, along reverse "
        "edges, which `undirected` in `data.options` makes; default: in, also along reverse edges.",
        None,
    )
    num_walks: int | None = setting("walks: number of walks from each vertex; default: 50.", None, at_least=1)
    length: int | None = setting("walks: steps of each walk; default: 4.", None, at_least=1)
    restart: float | None = setting(
        "walks: probability that a walk returns to its vertex before a step; default: 0.15.", None, at_least=0, below=1
    )
    metapath: tuple[str, ...] | None = setting(
        "walks: edge types of one step, from the seed outwards and back to its type, as [user__buys__item, "
        "item__rev_buys__user]; a vertex of another type, here an item, walks round from there. Needed if there are "
        "several edge types.",
        None,
        form=WORD,
    )


@dataclass(frozen=True)
class Start:
    """The weights of another run from which a run starts. `start: RUN` is short for `start: {checkpoint: RUN}`."""

    checkpoint: str = setting(
        "A file on this machine, or the id of an earlier run in runs_dir; its best weights are taken."
    )
    modules: tuple[str, ...] = setting(
        "Names of the modules to take, as [layers.0]; `embedding` has the trainable rows. Default: all.", (), form=WORD
    )


#: One of several kinds with its arguments; a word is short for ``{name: word}``.
Named: TypeAlias = Mapping[Literal["name"] | str, Any]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the bundled trainer; each is passed as one flag of `python -m trainer train`."""

    model: str = setting(
        "`sage`, `gcn` or `gat`; for heterogeneous graphs `rgcn`, `hgt` or `rsage` (GraphSAGE per edge type); for task "
        "`link` also `lightgcn` and, without neighbours, `embedding`; for any graph `token-transformer`. Or a "
        "class: `FILE.py:CLASS`, or `PACKAGE.CLASS` such as torch_geometric.nn.GraphSAGE.",
        "sage",
        form=_MODEL,
    )
    model_args: Mapping[str, Any] | None = setting(
        "Further arguments of a model class, by name, for instance `{act: elu}`.", None, form=ANY
    )
    task: Literal[
        "auto", "classification", "regression", "multilabel", "link", "edge-classification", "edge-regression"
    ] = setting(
        "What is learned: classes, numbers or several labels of vertices; `link`: which links exist; `edge-…`: classes "
        "or numbers of edges. `auto` decides by the labels.",
        "auto",
    )
    target: str | None = setting(
        "Vertex type with the labels, or edge type, as `user__rates__item`; for task `link` also several, as "
        "`user__clicks__item,user__buys__item`, or `all` except reverses `rev_…`. Default: the only one; of links all "
        "types of which some are held out.",
        None,
        form=WORD,
    )
    hidden: int = setting("Width of the hidden layers.", 256, at_least=1)
    layers: int | None = setting(
        "Number of layers; default, and the only valid value: the number of fanouts. token-transformer: any, default "
        "2.",
        None,
        at_least=1,
    )
    heads: int = setting("Number of attention heads (gat, hgt, token-transformer, model classes).", 4, at_least=1)
    max_tokens: int = setting(
        "Longest sequence of vertices around a seed, itself included (token-transformer); the nearest are kept.",
        128,
        at_least=2,
    )
    output_heads: int | None = setting(
        "Number of attention heads of the last layer (gat); default: those of the others.", None, at_least=1
    )
    activation: Literal["relu", "elu"] = setting("Function between layers, except in hgt.", "relu")
    dropout: float = setting("Dropout probability between layers.", 0.3, at_least=0, below=1)
    input_dropout: float = setting("Dropout probability of the features of vertices.", 0.0, at_least=0, below=1)
    attention_dropout: float = setting("Dropout probability of attention weights (gat).", 0.0, at_least=0, below=1)
    fanouts: tuple[int, ...] = setting(
        "Neighbours sampled per vertex, one number per hop, first hop first; -1: all neighbours.", (15, 10, 5)
    )
    eval_fanouts: tuple[int, ...] | None = setting("Fanouts for evaluation; default: those of training.", None)
    neighbors: Neighbors | None = setting(
        "How neighbours are chosen: a name, or the keys below; default: they are drawn.", None
    )
    replace: bool = setting("Sample neighbours with replacement.", False)
    weight_attr: str | None = setting(
        "Edge attribute used as sampling weight; edges of weight 0 are never sampled.", None, form=WORD
    )
    edge_attr: tuple[str, ...] | None = setting(
        "Edge attributes used as features of edges, side by side, by sage, rsage and model classes, as `edge_attr` or "
        "`[edge_attr, channel]`, and one as score of neighbours, by token-transformer. `tables` calls the features of "
        "an edge table `edge_attr`; columns of categories are embedded.",
        None,
        form=WORD,
    )
    category_dims: Mapping[str, int] | None = setting(
        "Width of the embeddings of columns of categories, by name, as `{region: 8, customer.plan: 0, "
        "user__rates__item.channel: 4}`; 0: the column is not read. Default: half the number of categories, rounded "
        "up, at most 50.",
        None,
        form=ANY,
    )
    time_attr: str | None = setting(
        "Integer attribute used as time, of vertices or, for task link, of edges (`tables` calls it `edge_time`); "
        "neighbours later than their seed are never sampled.",
        None,
        form=WORD,
    )
    temporal_strategy: Literal["uniform", "last"] = setting(
        "With time_attr: `uniform` samples among the earlier neighbours, `last` takes the most recent ones.", "uniform"
    )
    disjoint: bool = setting(
        "Sample a separate subgraph for each seed; a vertex may then occur several times in a batch.", False
    )
    batch_size: int = setting("Global batch: seed vertices per step over all processes.", 1024, at_least=1)
    eval_batch_size: int = setting("Global batch for evaluation.", 4096, at_least=1)
    hide: bool = setting(
        "Labels of edges: leave the edges of a step, and their reverses `rev_…`, out of the sampled neighbourhoods, as "
        "task `link` does.",
        False,
    )
    decoder: Literal["dot", "distmult", "complex", "transe", "rotate"] = setting(
        "Task `link`: score of a link from the rows of its ends: their dot product, or one with weights for each edge "
        "type, as for knowledge graphs, by which also the sources of links are learned and ranked.",
        "dot",
    )
    loss: Literal["softmax", "in-batch", "bpr", "bce"] = setting(
        "Task `link`: loss of a link against the step's negatives: softmax; bpr (each negative is to score lower); bce "
        "(binary cross entropy). in-batch: softmax against the targets of the step's other links, in place of "
        "`negatives`, corrected by how often each target is linked.",
        "softmax",
    )
    negatives: int = setting(
        "Task `link`: randomly drawn targets per step, which its links share as negatives.",
        128,
        at_least=1,
    )
    hard_negatives: str | None = setting(
        "Task `link`: edge type from sources of links to vertices that are negatives of their links, beside "
        "`negatives`, as `user__returns__item`.",
        None,
        form=WORD,
    )
    num_hard_negatives: int = setting(
        "Largest number of `hard_negatives` per link; if there are more, they are drawn in each step.",
        4,
        at_least=1,
    )
    eval_negatives: int | Literal["all"] = setting(
        "Task `link`: number of randomly drawn vertices among which the target of a link is ranked; all: all to which "
        "its source is not linked yet, with metrics as `recall@20`.",
        1000,
        at_least=1,
    )
    eval_candidates: str | None = setting(
        "Task `link`: edge type from sources of links to the vertices among which the targets of their held-out links "
        "are ranked, as `user__shown__item`; with `time_attr`, those of the link's time. Default: by `eval_negatives`.",
        None,
        form=WORD,
    )
    epochs: int = setting("Total passes over the train seeds, including those before `resume`.", 10, at_least=1)
    lr: float = setting("Learning rate.", 0.004, above=0)
    optimizer: Named | None = setting(
        "Optimizer of torch.optim with its arguments, as `AdamW` or `{name: SGD, momentum: 0.9}`; `lr` and "
        "`weight_decay` are keys of their own. Default: Adam.",
        None,
        form=ANY,
    )
    schedule: Schedule | None = setting(
        "How the learning rates change: a name, or the keys below; default: they are constant.", None
    )
    clip: float | None = setting(
        "Largest norm of the gradient of all weights; a larger one is scaled down to it. Default: no limit.",
        None,
        above=0,
    )
    embeddings: Literal["auto", "featureless", "all"] = setting(
        "Which vertices have trainable rows, in rgcn, hgt, rsage, token-transformer and model classes. featureless: "
        "those without features, in heterogeneous graphs; all: all, also beside features; auto: as featureless, and "
        "for task `link` also the links' targets beside their features, if these rows take at most 1 GB.", "auto"
    )  # fmt: skip
    embedding_lr: float | None = setting(
        "Learning rate of trainable rows of vertices (SparseAdam); default: lr.", None, above=0
    )
    weight_decay: float = setting("Weight decay of the optimizer.", 0.0, at_least=0)
    class_weights: Literal["balanced"] | tuple[float, ...] | None = setting(
        "Classification: weight of each class in the loss, as [1, 1, 5]; `balanced`: the inverse of its share of the "
        "train seeds. Default: 1.",
        None,
        at_least=0,
    )
    label_smoothing: float = setting(
        "Classification: share of each label that is spread over all classes.", 0.0, at_least=0, below=1
    )
    seed: int = setting(
        "Random seed of batch order, sampling, dropout and initial weights.", 0, at_least=0, below=2**32
    )
    metrics: tuple[str, ...] = setting(
        "Metrics on val and test, as [macro_f1, roc_auc]; the first one chooses the best epoch. Default: those of the "
        "task.",
        (),
        form=WORD,
    )
    early_stop: EarlyStop | None = setting(
        "End the run once a metric on val no longer improves: a patience, or the keys below.", None
    )
    eval_every: int = setting("Epochs between evaluations on the val split; 0: only at the end.", 1, at_least=0)
    checkpoint_every: int = setting("Epochs between checkpoints; 0: only at the end.", 1, at_least=0)
    checkpoint_seconds: float = setting(
        "Seconds between checkpoints within an epoch; 0: none.", 60.0, at_least=0, below=1_000_000
    )
    track: Mapping[str, Mapping[str, Any]] | None = setting(
        "Trackers that the lead node sends the run to: `[tensorboard, wandb, mlflow]`, or each with its options, as "
        "`{wandb: {project: gnn, mode: offline}}`; also for your own command.",
        None,
        form=ANY,
    )
    sampler_threads: int = setting("Sampler threads per process.", 1, at_least=1)
    prefetch: int = setting(
        "Batches in memory per process, including the one in use; at least sampler_threads + 1.", 2, at_least=1
    )
    sampling: Literal["auto", "cpu", "cuda"] = setting(
        "Where batches are sampled and gathered. cuda: on each GPU, needs the topology of all parts on the node; auto: "
        "cuda where it is possible.", "auto"
    )  # fmt: skip
    device_cache: str = setting(
        "Feature rows cached on each GPU, the most often needed first: a share of all (10%), a size (512MB), or 0.", "0"
    )
    backend: Literal["auto", "gloo", "nccl"] = setting(
        "torch.distributed backend; auto: nccl if every training node has devices, else gloo.", "auto"
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "Type in which the layers compute; `bfloat16` accumulates in float32, and changes results.", "float32"
    )
    timeout: float = setting("Seconds after which a wait for another process fails.", 120.0, above=0, below=1_000_000)
    keep: int = setting(
        "Checkpoints of the best epochs that are kept on the lead node, besides the newest.", 1, at_least=1
    )
    start: Start | None = setting(
        "Start from the weights of another run: a checkpoint, or the keys below; without effect if it is resumed.", None
    )
    resume: str | None = setting(
        "Checkpoint to continue from: a file on this machine, or the id of an earlier run in runs_dir.", None
    )


class Problem(NamedTuple):
    """A setting that cannot be used."""

    place: tuple[str, ...]  #: path of the key, such as ("schedule", "every")
    text: str
    others: tuple[str, ...] = ()  #: other settings that the text is about

    def __str__(self) -> str:
        return f"{'.'.join(self.place)}: {self.text}"


def problems(train: TrainConfig) -> Iterator[Problem]:
    """Find settings that are impossible, or that contradict each other, whatever the graph and the nodes are."""
    yield from _of_model(train)
    yield from _of_fanouts(train)
    yield from _of_neighbors(train)
    yield from _of_task(train)
    yield from _of_optimizer(train)

    # The schedule of the learning rate, and what needs scores on val.
    evaluated: list[tuple[str, str | None]] = [("early_stop", train.early_stop.metric)] if train.early_stop else []
    if (schedule := train.schedule) is not None:
        yield from _keys_of_others("schedule", schedule.name, _SCHEDULES, schedule)
        for name in ("warmup_steps", "warmup_epochs") if schedule.name == "one-cycle" else ():
            if getattr(schedule, name):
                yield Problem(("schedule", name), "one-cycle has a rise of its own; leave it out")
        if schedule.warmup_steps and schedule.warmup_epochs:
            yield Problem(("schedule", "warmup_steps"), "give warmup_steps or warmup_epochs, not both")
        if schedule.name == "plateau":
            evaluated.append(("schedule", schedule.metric))
    for section, metric in evaluated:
        if not train.eval_every:
            yield Problem((section,), "needs evaluations on val, but eval_every is 0", ("eval_every",))
        if metric not in (None, "loss"):
            yield from _of_metric((section, "metric"), str(metric), train)

    # Trackers.
    options: Any
    for name, options in (train.track or {}).items():
        place = ("track", name)
        if name not in TRACKERS:
            yield Problem(place[:1], _unknown("tracker", name, TRACKERS))
            continue
        if not isinstance(options or {}, Mapping):
            yield Problem(place, f"expected options of {name}, found {reprlib.repr(options)}")
            continue
        known = TRACKERS[name].options
        for key, value in (options or {}).items():
            if key not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                yield Problem(place, f"{name} has no option {reprlib.repr(key)}; {has}")
            elif not isinstance(value, str) or not value:
                yield Problem((*place, key), f"expected text, found {reprlib.repr(value)}")
            elif key == "mode" and value not in ("online", "offline"):
                yield Problem((*place, key), f"expected online or offline, found {reprlib.repr(value)}")
            elif key == "uri" and "@" in urlsplit(value).netloc:
                text = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on the host instead of writing them"
                yield Problem((*place, key), f"{text} here")

    try:
        CacheSize.parse(train.device_cache, "all rows")
    except ValueError as error:
        yield Problem(("device_cache",), str(error))


def _of_model(train: TrainConfig) -> Iterator[Problem]:
    model, own = train.model, is_own_model(train.model)
    if not own and model not in MODELS:
        text = f"{_unknown('model', model, MODELS)} (or a class: FILE.py:CLASS, PACKAGE.CLASS)"
        yield Problem(("model",), text)
        return
    if model.endswith(".py"):
        yield Problem(("model",), f"{model} is a file without the name of a class; write {model}:CLASS")
    if train.model_args and not own:
        yield Problem(("model_args",), f"{model} is a bundled model, which takes no further arguments; leave them out")
    for name, dim in (train.category_dims or {}).items():
        if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim <= 1024:
            found = reprlib.repr(dim)
            yield Problem(("category_dims", name), f"expected a whole number from 0 to 1024, found {found}")
    for name, models in _OF_MODELS.items():
        if getattr(train, name) != getattr(TrainConfig, name) and model not in models:
            hint = "pass it to your class by model_args" if own else f"use {' or '.join(models)}"
            yield Problem((name,), f"model {model} does not read it; {hint}", ("model",))
    if model in ("gat", "hgt", "token-transformer") and train.hidden % train.heads:
        text = f"{train.heads} heads do not divide hidden ({train.hidden}), as {model} needs; change one of them"
        yield Problem(("heads",), text, ("hidden", "model"))
    if model in ("lightgcn", "embedding") and train.task not in ("auto", "link"):
        yield Problem(("model",), f"{model} is for task link, not {train.task}", ("task",))
    ruled = train.neighbors is not None and train.neighbors.name in ("ppr", "walks")
    if model in _OF_DEGREES and train.time_attr is not None and not ruled:
        yield Problem(
            ("time_attr",),
            f"model {model} divides messages by degrees in the whole graph, which count later edges; use sage, for "
            "several types rsage",
            ("model", "neighbors"),
        )
    if train.edge_attr and not own and model not in EDGE_MODELS:
        text = f"model {model} does not read edge features; use sage, for several types rsage"
        yield Problem(("edge_attr",), text, ("model",))


def _of_fanouts(train: TrainConfig) -> Iterator[Problem]:
    if train.model == "embedding":
        if train.layers is not None:
            yield Problem(("layers",), "model embedding has none; leave it out", ("model",))
        return
    hops = len(train.fanouts)
    for name, fanouts in (("fanouts", train.fanouts), ("eval_fanouts", train.eval_fanouts)):
        wrong = [fanout for fanout in fanouts or () if fanout == 0 or fanout < -1]
        if wrong:
            yield Problem((name,), f"each must be -1 (all neighbours) or at least 1; found {wrong[0]}")
    if not hops:
        yield Problem(("fanouts",), "empty; give one number per layer")
    elif train.layers not in (None, hops) and train.model != "token-transformer":
        text = f"{train.layers}, but fanouts has {hops} numbers; give one fanout per layer, or leave layers out"
        yield Problem(("layers",), text, ("fanouts", "model"))
    if hops and train.eval_fanouts is not None and len(train.eval_fanouts) != hops:
        text = f"{len(train.eval_fanouts)} numbers, but fanouts has {hops}; both need one per layer"
        yield Problem(("eval_fanouts",), text, ("fanouts",))


def _of_neighbors(train: TrainConfig) -> Iterator[Problem]:
    if train.neighbors is None:
        return
    place, name = ("neighbors",), train.neighbors.name
    yield from _keys_of_others("neighbors", name, NEIGHBORS, train.neighbors)
    if name == "top" and train.weight_attr is None and train.time_attr is None:
        text = "top takes the heaviest or the latest neighbours; set weight_attr or time_attr"
        yield Problem(place, text, ("weight_attr", "time_attr"))
    if name != "fanout" and train.replace:
        yield Problem(("replace",), f"has no effect with neighbors: {name}; leave it out", place)
    if name not in ("ppr", "walks"):
        return
    if train.model in _WITHOUT_SCORES:
        text = f"{train.model} does not read the scores that {name} gives; use another model"
        yield Problem(place, text, ("model",))
    if train.edge_attr:
        text = f"neighbors: {name} makes edges of its own, which have no attributes; leave it out"
        yield Problem(("edge_attr",), text, place)
    if train.sampling == "cuda":
        yield Problem(("sampling",), f"neighbours by {name} are chosen by the CPU; set auto or cpu", place)
    if wrong := [k for k in (*train.fanouts, *(train.eval_fanouts or ())) if k < 1]:
        text = f"{wrong[0]} neighbours by {name}; give the number of neighbours of each layer"
        yield Problem(("fanouts",), text, ("eval_fanouts", *place))


def _of_task(train: TrainConfig) -> Iterator[Problem]:
    for name, given in (("class_weights", train.class_weights), ("label_smoothing", train.label_smoothing)):
        if given and train.task not in ("auto", "classification"):
            yield Problem((name,), f"is for task classification, not {train.task}", ("task",))
    if isinstance(train.class_weights, tuple) and not any(train.class_weights):
        yield Problem(("class_weights",), "no class has a weight above 0, so nothing would be learned")
    if train.hide and train.task != "auto" and not train.task.startswith("edge-"):
        yield Problem(("hide",), f"is for labels of edges, not for task {train.task}", ("task",))
    for name in train.metrics:
        yield from _of_metric(("metrics",), name, train)
    if train.decoder == "dot":
        return
    wrong = ""
    if train.task not in ("auto", "link"):
        wrong = f"scores links, and task {train.task} has none"
    elif train.decoder in ("complex", "rotate") and train.hidden % 2:
        wrong = f"has rows of complex numbers, so hidden must be even, not {train.hidden}"
    elif train.time_attr is not None:
        wrong = "is for links without times (time_attr); use dot"
    elif train.loss == "in-batch":
        wrong = "is not for loss in-batch; use softmax"
    elif train.hard_negatives is not None:
        wrong = "is not for hard_negatives; use dot"
    if wrong:
        others = ("task", "hidden", "time_attr", "loss", "hard_negatives")
        yield Problem(("decoder",), f"{train.decoder} {wrong}", others)


def _of_metric(place: tuple[str, ...], name: str, train: TrainConfig) -> Iterator[Problem]:
    tasks = METRICS if train.task == "auto" else (train.task.removeprefix("edge-"),)
    known = list(dict.fromkeys(metric for task in tasks for metric in METRICS[task]))
    kind, _, k = name.partition("@")
    if "link" in tasks and kind in AT_K and k.isdecimal() and int(k):
        if kind != "hits" and train.eval_negatives != "all":
            yield Problem(place, f"{name} needs eval_negatives: all", ("task", "eval_negatives"))
    elif name not in known:
        known += [f"{each}@K" for each in AT_K] if "link" in tasks else []
        of = "are" if train.task == "auto" else f"of task {train.task} are"
        yield Problem(place, f"no metric {reprlib.repr(name)}; the metrics {of} {', '.join(known)}", ("task",))


#: Kinds of the arguments of optimizers that are not a number.
_PAIRS, _FLAGS = (
    ("betas", "etas", "step_sizes"),
    ("amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov"),
)
#: Arguments of optimizers that must be in a range -> the range, and whether a number, or two, are in it.
_RANGES: Mapping[str, tuple[str, Callable[..., bool]]] = {
    **dict.fromkeys(
        "eps momentum momentum_decay lr_decay initial_accumulator_value alpha".split(),
        ("at least 0", lambda value: value >= 0),
    ),
    "rho": ("a number from 0 to 1", lambda rho: 0 <= rho <= 1),
    "betas": ("two numbers of at least 0 and below 1", lambda first, second: 0 <= first < 1 and 0 <= second < 1),
    "etas": ("one number above 0 and below 1, and one above 1", lambda less, more: 0 < less < 1 < more),
}


def _of_optimizer(train: TrainConfig) -> Iterator[Problem]:
    if train.optimizer is None:
        return
    name, place = str(train.optimizer.get("name")), ("optimizer",)
    if name not in OPTIMIZERS:
        text = _unknown("optimizer of torch.optim", name, OPTIMIZERS)
        yield Problem(
            place, text if "name" in train.optimizer else f"its name is missing; there are {', '.join(OPTIMIZERS)}"
        )
        return
    known = OPTIMIZERS[name].split()
    for key, value in train.optimizer.items():
        kind = "two numbers" if key in _PAIRS else "true or false" if key in _FLAGS else "a number"
        pair = value if isinstance(value, list | tuple) else [value]
        fits = all(isinstance(one, int | float) and isinstance(one, bool) == (key in _FLAGS) for one in pair)
        if key in ("lr", "weight_decay"):
            yield Problem((*place, key), f"set {key} instead")
        elif key != "name" and key not in known:
            yield Problem(place, f"{name} has no argument {reprlib.repr(key)}; it has {', '.join(known)}")
        elif key != "name" and not (fits and len(pair) == 1 + (key in _PAIRS)):
            yield Problem((*place, key), f"expected {kind}, found {reprlib.repr(value)}")
        elif key in _RANGES and not _RANGES[key][1](*pair):
            yield Problem((*place, key), f"expected {_RANGES[key][0]}, found {reprlib.repr(value)}")
    given = train.optimizer.get
    if "nesterov" in known and given("nesterov") and (not given("momentum") or given("dampening")):
        yield Problem((*place, "nesterov"), "needs a momentum above 0, and no dampening")
    if name == "Rprop" and train.weight_decay:
        yield Problem(("weight_decay",), "Rprop has none", place)


def _keys_of_others(section: str, name: str, keys: Mapping[str, str], given: Any) -> Iterator[Problem]:
    """Report keys of a section that ``name`` does not have. ``keys``: those that only some names have."""
    known = keys[name].split()
    for key in sorted({key for some in keys.values() for key in some.split()}.difference(known)):
        if getattr(given, key) is not None:
            has = f"; it has {', '.join(known)}" if known else ""
            yield Problem((section, key), f"{name} has no such key{has}")


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    by_lower = {one.lower(): one for one in known}
    word = name[:40].lower()
    near = [one for one in by_lower if word.endswith(one)] or difflib.get_close_matches(word, by_lower, 1)  # graphsage
    hint = f"did you mean {by_lower[near[0]]}?" if near else f"there are {', '.join(known)}"
    return f"there is no {what} {reprlib.repr(name)}; {hint}"
