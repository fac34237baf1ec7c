"""Settings of ``python -m trainer train``: a frozen dataclass with one command-line option per field."""

from __future__ import annotations

import functools
import json
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec

from trainer.core.errors import SettingsError
from trainer.core.remote_settings import CacheSize, RemoteAccess
from trainer.core.schema import EdgeType, type_of
from trainer.sampler.rule_types import PPR, Rule, Walks
from trainer.track.tracker import TRACKERS

#: Names of the bundled models.
MODELS = ("sage", "gcn", "gat", "rgcn", "hgt", "rsage", "lightgcn", "embedding", "token-transformer")

#: Bundled models that do not read the scores of neighbours by PageRank or walks.
WITHOUT_SCORES = ("lightgcn", "embedding")

#: Bundled models that divide messages by degrees in the whole graph, which count edges later than a seed.
OF_DEGREES = ("gcn", "lightgcn")

#: Settings that only some bundled models read, and no class of your own.
OF_MODELS: Mapping[str, tuple[str, ...]] = {
    "output_heads": ("gat",),
    "activation": tuple(name for name in MODELS if name not in ("hgt", "lightgcn", "embedding", "token-transformer")),
    "input_dropout": tuple(name for name in MODELS if name not in ("lightgcn", "embedding")),
    "attention_dropout": ("gat",),
    "max_tokens": ("token-transformer",),
}

F = TypeVar("F", bound=Callable[..., Any])

_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "below": ("less than", operator.lt),
}


def setting(help: str, default: Any, **limits: float) -> Any:
    """Return a field of a settings dataclass. A value is required if ``default`` is ``...``.

    ``help``: text for ``--help``. ``limits`` of the value: ``at_least``, ``above`` and ``below``.
    """
    metadata = {"help": help, "limits": limits}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EarlyStop:
    """When a run ends before ``epochs``."""

    patience: int = setting("evaluations on val without an improvement", ..., at_least=1)
    metric: str | None = setting("what must improve, loss or a metric of the task", None)
    min_delta: float = setting("an improvement is a change by more than this", 0.0, at_least=0)


#: The schedules with the keys that only some of them have.
SCHEDULES: Mapping[str, str] = {
    "constant": "",
    "cosine": "lowest epochs",
    "step": "every factor",
    "plateau": "factor patience metric lowest",
    "one-cycle": "rise lowest epochs",
}


@dataclass(frozen=True)
class Schedule:
    """How the learning rates change."""

    name: Literal["constant", "cosine", "step", "plateau", "one-cycle"] = setting(
        "constant, cosine, step, plateau or one-cycle", ...
    )
    warmup_steps: int = setting("steps in which the rate first grows from 0", 0, at_least=0)
    warmup_epochs: int = setting("the same in epochs", 0, at_least=0)
    every: int | None = setting("step: epochs between two changes (10)", None, at_least=1)
    factor: float | None = setting("step, plateau: what the rate is multiplied by (0.1)", None, above=0, below=1)
    patience: int | None = setting("plateau: evaluations without an improvement before a change (10)", None, at_least=1)
    metric: str | None = setting("plateau: what must improve, loss or a metric of the task", None)
    rise: float | None = setting("one-cycle: share of the steps in which the rate rises (0.3)", None, above=0, below=1)
    lowest: float | None = setting(
        "cosine, plateau, one-cycle: lowest rate, as a share of lr (0)", None, at_least=0, below=1
    )
    epochs: int | None = setting("cosine, one-cycle: epochs until the lowest rate (all)", None, at_least=1)


#: The ways to choose neighbours, with the keys that only some of them have.
NEIGHBORS: Mapping[str, str] = {
    "fanout": "",
    "top": "",
    "ppr": "alpha eps edge_types direction",
    "walks": "num_walks length restart metapath",
}


@dataclass(frozen=True)
class Neighbors:
    """How the neighbours of a node are chosen, as many as ``fanouts`` says."""

    name: Literal["fanout", "top", "ppr", "walks"] = setting(
        "fanout: drawn; top: of the highest weight_attr, or without it the latest by time_attr; ppr: of the highest "
        "personalised PageRank; walks: visited most often by random walks", ...
    )  # fmt: skip
    alpha: float | None = setting("ppr: probability that a walk ends before each step (0.15)", None, above=0, below=1)
    eps: float | None = setting(
        "ppr: residual per in-edge up to which a node is pushed (0.0001)", None, above=0, below=1
    )
    edge_types: tuple[str, ...] | None = setting("ppr: edge types that walks follow (all)", None)
    direction: Literal["in", "out", "both"] | None = setting(
        "ppr: in: walks go from target to source; out: from source to target, along reverse edges (in, also along "
        "reverse edges)", None
    )  # fmt: skip
    num_walks: int | None = setting("walks: number for each node (50)", None, at_least=1)
    length: int | None = setting("walks: steps of each (4)", None, at_least=1)
    restart: float | None = setting("walks: probability of a return before a step (0.15)", None, at_least=0, below=1)
    metapath: tuple[str, ...] | None = setting("walks: edge types of a step, from the seed outwards", None)

    @property
    def rule(self) -> Rule | None:
        """The rule of the sampler; None: neighbours are edges of the graph."""
        given = {key: getattr(self, key) for key in NEIGHBORS[self.name].split() if getattr(self, key) is not None}
        for key in given.keys() & {"edge_types", "metapath"}:
            given[key] = tuple(type_of(name) for name in given[key])
        return {"ppr": PPR, "walks": Walks}[self.name](**given) if self.name in ("ppr", "walks") else None


@dataclass(frozen=True)
class Start:
    """The weights of another run from which a run starts."""

    checkpoint: str = setting("checkpoint file; rank 0 reads it", ...)
    modules: tuple[str, ...] = setting("names of the modules to take, such as layers.0; default: all", ())


@dataclass(frozen=True)
class TrainSettings:
    """Model, data and optimisation of a run of the bundled trainer: the keys of ``train`` in cluster.yml.

    [cluster.yml](config.md#train) describes each field.

    Raises:
        SettingsError: Lists all invalid values.
    """

    model: str = setting(
        "Model: sage, gcn or gat; for heterogeneous graphs rgcn, hgt or rsage; for links lightgcn or, without "
        "neighbours, embedding; for any graph token-transformer; or a class, as FILE.py:CLASS or PACKAGE.CLASS "
        "(torch_geometric.nn.GraphSAGE).", "sage"
    )  # fmt: skip
    model_args: Mapping[str, Any] | None = setting("Further arguments of a model class of your own, by name.", None)
    task: Literal[
        "auto", "classification", "regression", "multilabel", "link", "edge-classification", "edge-regression"
    ] = setting(
        "What is learned: classes, numbers or several labels of nodes; link: which links exist; edge-…: classes or "
        "numbers of edges; auto: by the labels y.", "auto"
    )  # fmt: skip
    target: str | None = setting(
        "Node type with the labels, or edge type (source__relation__target), of links also several, with commas, or "
        "all; default: the only one, of links all that are held out.",
        None,
    )
    hidden: int = setting("Width of hidden layers.", 256, at_least=1)
    layers: int | None = setting(
        "Number of layers; default, and only valid: the number of fanouts. token-transformer: any, default 2.",
        None,
        at_least=1,
    )
    heads: int = setting("Attention heads (gat, hgt, token-transformer).", 4, at_least=1)
    max_tokens: int = setting(
        "Longest sequence of nodes around a seed, itself included (token-transformer); the nearest are kept.",
        128,
        at_least=2,
    )
    output_heads: int | None = setting("Attention heads of the last layer (gat); default: heads.", None, at_least=1)
    activation: Literal["relu", "elu"] = setting("Function between layers, except in hgt.", "relu")
    dropout: float = setting("Dropout probability between layers.", 0.3, at_least=0, below=1)
    input_dropout: float = setting("Dropout probability of the nodes' features.", 0.0, at_least=0, below=1)
    attention_dropout: float = setting("Dropout probability of attention weights (gat).", 0.0, at_least=0, below=1)
    fanouts: tuple[int, ...] = setting("Neighbours per hop, from the seeds outward; -1: all.", (15, 10, 5))
    eval_fanouts: tuple[int, ...] | None = setting("Fanouts for evaluation; default: fanouts.", None)
    neighbors: Neighbors | None = setting("How neighbours are chosen; default: they are drawn.", None)
    replace: bool = setting("Sample neighbours with replacement.", False)
    weight_attr: str | None = setting(
        "Edge attribute used as sampling weight; edges of weight 0 are never sampled.", None
    )
    edge_attr: str | None = setting(
        "Edge attribute used as features of edges, by sage and rsage; as score of neighbours, by token-transformer.",
        None,
    )
    category_dims: Mapping[str, Any] | None = setting(
        "Width of the embeddings of columns of categories, by name (region, or customer.region); 0: the column is not "
        "read. Default: half the number of categories, at most 50.",
        None,
    )
    time_attr: str | None = setting(
        "Integer attribute used as time, of nodes or, for task link, of edges; neighbours later than their seed are "
        "never sampled.",
        None,
    )
    temporal_strategy: Literal["uniform", "last"] = setting(
        "With time_attr: sample among the earlier neighbours, or take the most recent ones.", "uniform"
    )
    disjoint: bool = setting("Sample a separate subgraph for each seed.", False)
    batch_size: int = setting("Global batch: seeds per step over all processes.", 1024, at_least=1)
    eval_batch_size: int = setting("Global batch for evaluation.", 4096, at_least=1)
    hide: bool = setting(
        "Labels of edges: leave the edges of a step, and their reverses, out of the sampled neighbourhoods.", False
    )
    decoder: Literal["dot", "distmult", "complex", "transe", "rotate"] = setting(
        "Task link: score of a link. All but dot have weights per edge type, and rank sources as well as targets.",
        "dot",
    )
    loss: Literal["softmax", "in-batch", "bpr", "bce"] = setting(
        "Task link: loss of a link against the step's negatives. in-batch: softmax against the targets of the step's "
        "other links, corrected by how often each target is linked.", "softmax"
    )  # fmt: skip
    negatives: int = setting("Task link: negative targets per step, which its links share.", 128, at_least=1)
    hard_negatives: str | None = setting(
        "Task link: edge type from sources of links to nodes that are negatives of their links beside negatives.", None
    )
    num_hard_negatives: int = setting(
        "Largest number of hard_negatives per link; if there are more, they are drawn in each step.", 4, at_least=1
    )
    eval_negatives: Literal["all"] | int = setting(
        "Task link: number of nodes among which a link's target is ranked; all: all to which its source is not linked.",
        1000,
        at_least=1,
    )
    eval_candidates: str | None = setting(
        "Task link: edge type from sources of links to the targets among which their held-out links are ranked, "
        "instead of drawn or all ones.", None
    )  # fmt: skip
    epochs: int = setting("Total passes over the train seeds, including those before `resume`.", 10, at_least=1)
    lr: float = setting("Learning rate.", 0.004, above=0)
    optimizer: Mapping[str, Any] | None = setting(
        'Optimizer of torch.optim with its arguments except lr and weight_decay: a name, or JSON such as {"name": '
        '"SGD", "momentum": 0.9}; default: Adam.', None
    )  # fmt: skip
    schedule: Schedule | None = setting("How the learning rates change; default: they are constant.", None)
    clip: float | None = setting("Largest norm of the gradient of all weights; default: no limit.", None, above=0)
    embeddings: Literal["auto", "featureless", "all"] = setting(
        "Which nodes have trainable rows, in rgcn, hgt, rsage, token-transformer and model classes. featureless: those "
        "without features, in heterogeneous graphs; all: all, also beside features; auto: as featureless, and for task "
        "link also the links' targets beside their features, if these rows take at most 1 GB.", "auto"
    )  # fmt: skip
    embedding_lr: float | None = setting(
        "Learning rate of trainable rows of nodes (SparseAdam); default: lr.", None, above=0
    )
    weight_decay: float = setting("Weight decay of the optimizer.", 0.0, at_least=0)
    class_weights: Literal["balanced"] | tuple[float, ...] | None = setting(
        "Task classification: weight of each class in the loss, as 1,1,5; balanced: the inverse of its share of the "
        "train seeds; default: 1.",
        None,
        at_least=0,
    )
    label_smoothing: float = setting(
        "Task classification: share of each label that is spread over all classes.", 0.0, at_least=0, below=1
    )
    seed: int = setting("Random seed of seed order, samples, dropout and initial weights.", 0, at_least=0, below=2**32)
    metrics: tuple[str, ...] = setting(
        "Metrics on val and test, as macro_f1,roc_auc; the first one chooses the best epoch; default: by the task.",
        (),
    )
    early_stop: EarlyStop | None = setting("End the run once a metric on val no longer improves.", None)
    eval_every: int = setting("Epochs between evaluations on val; 0: only at the end.", 1, at_least=0)
    checkpoint_every: int = setting("Epochs between checkpoints; 0: only at the end.", 1, at_least=0)
    checkpoint_seconds: float = setting(
        "Seconds between checkpoints within an epoch; 0: none.", 60.0, at_least=0, below=1_000_000
    )
    track: Mapping[str, Mapping[str, Any]] | None = setting(
        "Trackers that the run is sent to: tensorboard, wandb, mlflow; several and their options as JSON, "
        '{"wandb": {"project": "gnn"}, "mlflow": {}}.',
        None,
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
    backend: Literal["auto", "gloo", "nccl"] = setting("torch.distributed backend.", "auto")
    precision: Literal["float32", "bfloat16"] = setting(
        "Type in which the layers compute; bfloat16 accumulates in float32, and changes results.", "float32"
    )
    timeout: float = setting("Seconds that a wait for another process may take.", 120.0, above=0, below=1_000_000)
    keep: int = setting("Checkpoints of the best epochs that are kept, besides the newest.", 1, at_least=1)
    start: Start | None = setting("Start from the best weights of another run, unless it is resumed.", None)
    resume: str | None = setting("Checkpoint file to resume from; rank 0 reads it.", None)

    @property
    def silent(self) -> tuple[EdgeType, ...]:
        """Edge types that carry no messages. Raises ``SettingsError`` for a name of another form."""
        found = [(name, type_of(name)) for name in (self.hard_negatives, self.eval_candidates) if name is not None]
        for name, of in found:
            if isinstance(of, str):
                raise SettingsError(f"{name} is not an edge type; write source__relation__target")
        return tuple(of for _, of in found if not isinstance(of, str))

    def __post_init__(self) -> None:
        if self.model == "embedding":  # it has no layers
            object.__setattr__(self, "fanouts", ())
            object.__setattr__(self, "eval_fanouts", None)
        for name, kind in keyed_settings().items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _with_keys(name, kind, value))
        problems = [
            *_bad_model(self), *_unread(self), *_beyond_limits(self), *_bad_fanouts(self), *_bad_cache(self),
            *_bad_schedule(self), *_bad_neighbors(self),
            *(f"track: there is no tracker {name!r}; the trackers are {', '.join(TRACKERS)}"
              for name in self.track or () if name not in TRACKERS),
        ]  # fmt: skip
        if problems:
            raise SettingsError("\n".join(problems))


@dataclass(frozen=True)
class TrainJob:
    settings: TrainSettings
    parts: Path | None  #: partition folder; None on a client node, which has no parts
    run_dir: Path  #: folder for metrics and checkpoints
    part_ids: tuple[int, ...] | None = None  #: parts opened here; None: all
    cluster: Path | None = None  #: cluster.json; None unless other hosts serve the other parts
    key_file: Path | None = None  #: service.key; None unless the graph service is encrypted
    remote_access: RemoteAccess = RemoteAccess()
    digests: bool = True  #: compare files with their digests, unless a graph server of this node has compared them

    @property
    def timeout(self) -> float:
        """Timeout in seconds of waits for other processes."""
        return self.settings.timeout


@dataclass(frozen=True)
class InferJob:
    checkpoint: Path  #: checkpoint file; only rank 0 reads it
    parts: Path | None  #: partition folder; None on a client node, which has no parts
    out: Path  #: folder for results
    part_ids: tuple[int, ...] | None = None  #: this field and those without a comment are as in ``TrainJob``
    cluster: Path | None = None
    key_file: Path | None = None
    remote_access: RemoteAccess = RemoteAccess()
    nodes_at_once: int = 4096  #: nodes computed at a time; bounds memory
    timeout: float = 120.0  #: seconds that a wait for another process may take
    digests: bool = True
    top_k: int | None = None  #: task link: targets listed per source; None: 10, or 0 if there are very many pairs
    pairs: Path | None = None  #: task link: CSV file of pairs to score
    parquet: bool | None = None  #: also write Parquet files; None: if DuckDB is installed
    probabilities: bool = False  #: task classification: a column for the probability of each class
    fanouts: tuple[int, ...] | None = None  #: of an own class without layers; -1: all; None: as in evaluation

    def __post_init__(self) -> None:
        if self.fanouts and any(fanout < 1 and fanout != -1 for fanout in self.fanouts):
            raise SettingsError(f"fanouts is {list(self.fanouts)}; each must be at least 1, or -1 for all")


@functools.cache
def keyed_settings() -> dict[str, Any]:
    """Return the classes of the settings that have keys of their own, by name; ``Mapping`` for any keys."""
    hints = {name: typing.get_args(hint) for name, hint in typing.get_type_hints(TrainSettings).items()}
    first: dict[str, Any] = {name: typing.get_origin(kinds[0]) or kinds[0] for name, kinds in hints.items() if kinds}
    return {name: kind for name, kind in first.items() if is_dataclass(kind) or kind is Mapping}


def _with_keys(name: str, kind: Any, value: Any) -> Any:
    """Return a setting with keys of its own, made from a mapping; any other value stands for its first key."""
    if kind is Mapping:
        if isinstance(value, Mapping):
            return value
        if name in ("optimizer", "track"):
            return {"name": value} if name == "optimizer" else {value: {}}
        raise SettingsError(f"{name} is {value!r}; it must be keys with values")
    if isinstance(value, kind):
        return value
    known = [entry.name for entry in fields(kind)]
    keys = value if isinstance(value, Mapping) else {known[0]: value}
    if unknown := sorted(keys.keys() - set(known)):
        raise SettingsError(f"{name} has no key {unknown[0]!r}; its keys are {', '.join(known)}")
    try:
        made = msgspec.convert(dict(keys), kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{name}: {error}") from None
    if problems := [*_beyond_limits(made)]:
        raise SettingsError("\n".join(f"{name}.{problem}" for problem in problems))
    return made


class _Keyed(click.ParamType):
    """Value of an option with keys of its own: a JSON object, or the value of its first key."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or not value.lstrip().startswith("{"):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is no JSON object: {error}", param, ctx)


class _NumberOrWord(click.ParamType):
    """Value of an option: a whole number, or one of ``words``."""

    name = "n"

    def __init__(self, words: tuple[str, ...]):
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._words or isinstance(value, int):
            return value
        if not str(value).lstrip("-").isdecimal():
            self.fail(f"{value!r} is not a whole number or {' or '.join(self._words)}", param, ctx)
        return int(value)


class NumberList(click.ParamType):
    """Value of an option: comma-separated numbers of a type, such as ``15,10,5``, or one of ``words``."""

    name = "n,n,…"

    def __init__(self, number: type = int, words: tuple[str, ...] = ()):
        self._number, self._words = number, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple) or value in self._words:
            return value
        try:
            return tuple(self._number(word) for word in str(value).split(","))
        except ValueError:
            kind = "".join(f"{word} or " for word in self._words) + "a list of"
            numbers = "whole numbers" if self._number is int else "numbers"
            self.fail(f"{value!r} is not {kind} {numbers} like 15,10,5", param, ctx)


def settings_options(function: F) -> F:
    """Give a click command one option per field of ``TrainSettings``."""
    hints = typing.get_type_hints(TrainSettings)
    for entry in reversed(fields(TrainSettings)):
        function = _option(entry, hints[entry.name])(function)
    return function


def _option(entry: Field[Any], hint: Any) -> Callable[[F], F]:
    flag = "--" + entry.name.replace("_", "-")
    help = entry.metadata["help"]
    if keyed := keyed_settings().get(entry.name):
        if is_dataclass(keyed):
            keys = "; ".join(f"{key.name}: {key.metadata['help']}" for key in fields(keyed))
            help = f"{help} JSON with {keys}; or only the first of these values."
        return click.option(flag, type=_Keyed(), help=help)
    if hint is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", default=entry.default, help=help, show_default=True)
    return click.option(
        flag,
        type=_click_type(hint),
        default=entry.default,
        help=help,
        show_default=",".join(map(str, entry.default)) if isinstance(entry.default, tuple) else True,
    )


def _click_type(hint: Any) -> click.ParamType:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return click.Choice(options)
    words: tuple[str, ...] = ()
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        *choices, hint = (option for option in options if option is not type(None))
        words = tuple(word for choice in choices for word in typing.get_args(choice))
    if typing.get_origin(hint) is tuple:
        return NumberList(typing.get_args(hint)[0], words)
    if words:
        return _NumberOrWord(words)
    plain: dict[Any, click.ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING}
    return plain[hint]


def _beyond_limits(settings: Any) -> Iterator[str]:
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        for name, limit in entry.metadata["limits"].items():
            words, holds = _LIMITS[name]
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not holds(number, limit):
                    yield f"{entry.name} is {number}; it must be {words} {limit}"


def _bad_model(settings: TrainSettings) -> Iterator[str]:
    if settings.model not in MODELS and not re.search(r"[:.]", settings.model):
        yield (
            f"model is {settings.model!r}; it must be one of {', '.join(MODELS)}, or a class: FILE.py:CLASS or "
            "PACKAGE.CLASS"
        )


def _unread(settings: TrainSettings) -> Iterator[str]:
    """Report settings that the model does not read, or that it contradicts."""
    defaults = {entry.name: entry.default for entry in fields(settings)}
    for name, models in OF_MODELS.items():
        if getattr(settings, name) != defaults[name] and settings.model not in models:
            own = settings.model not in MODELS
            hint = "pass it to your class by model_args" if own else f"use {' or '.join(models)}"
            yield f"{name}: model {settings.model} does not read it; {hint}"
    if settings.decoder != "dot" and settings.task not in ("auto", "link"):
        yield f"decoder: {settings.decoder} scores links; task {settings.task} has none"
    if settings.decoder in ("complex", "rotate") and settings.hidden % 2:
        yield f"hidden is {settings.hidden}; decoder {settings.decoder} needs an even number: rows are complex"
    chosen = settings.neighbors is not None and settings.neighbors.name in ("ppr", "walks")
    if settings.model in OF_DEGREES and settings.time_attr is not None and not chosen:
        yield (
            f"time_attr: model {settings.model} divides messages by degrees in the whole graph, which count later "
            "edges; use sage, for several types rsage"
        )


def _bad_cache(settings: TrainSettings) -> Iterator[str]:
    try:
        CacheSize.parse(settings.device_cache)
    except SettingsError as error:
        yield f"device_cache: {error}"


def _bad_schedule(settings: TrainSettings) -> Iterator[str]:
    if (schedule := settings.schedule) is None:
        return
    known, some = SCHEDULES[schedule.name].split(), {key for keys in SCHEDULES.values() for key in keys.split()}
    for key in sorted(some.difference(known)):
        if getattr(schedule, key) is not None:
            yield f"schedule.{key}: {schedule.name} has no such key"
    if schedule.warmup_steps and schedule.warmup_epochs:
        yield "schedule: give warmup_steps or warmup_epochs, not both"
    if schedule.name == "one-cycle" and (schedule.warmup_steps or schedule.warmup_epochs):
        yield "schedule: one-cycle has its own warm-up, rise"


def _bad_neighbors(settings: TrainSettings) -> Iterator[str]:
    if (neighbors := settings.neighbors) is None:
        return
    known, some = NEIGHBORS[neighbors.name].split(), {key for keys in NEIGHBORS.values() for key in keys.split()}
    for key in sorted(some.difference(known)):
        if getattr(neighbors, key) is not None:
            yield f"neighbors.{key}: {neighbors.name} has no such key"
    if neighbors.name not in ("ppr", "walks"):
        return
    if settings.model in WITHOUT_SCORES:
        yield f"neighbors: model {settings.model} does not read the scores that {neighbors.name} gives; use another"
    if settings.sampling == "cuda":
        yield f"sampling: neighbours by {neighbors.name} are chosen by the CPU; use auto or cpu"
    for name, given in (("replace", settings.replace), ("edge_attr", settings.edge_attr)):
        if given:
            yield f"{name}: cannot be used with neighbors: {neighbors.name}, which draws no edges of the graph"


def _bad_fanouts(settings: TrainSettings) -> Iterator[str]:
    if settings.model == "embedding":
        if settings.layers is not None:
            yield "layers: model embedding has none; leave it out"
        return
    if settings.layers not in (None, len(settings.fanouts)) and settings.model != "token-transformer":
        yield f"layers is {settings.layers}, but there are {len(settings.fanouts)} fanouts; give one fanout per layer"
    for name in ("fanouts", "eval_fanouts"):
        fanouts = getattr(settings, name)
        if fanouts is not None and (not fanouts or any(fanout < 1 and fanout != -1 for fanout in fanouts)):
            yield f"{name} is {list(fanouts)}; it must list at least one number, each at least 1, or -1 for all"
    if settings.eval_fanouts is not None and len(settings.eval_fanouts) != len(settings.fanouts):
        yield f"eval_fanouts has {len(settings.eval_fanouts)} numbers, fanouts {len(settings.fanouts)}; one per layer"
