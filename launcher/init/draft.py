"""Renders the commented cluster.yml that ``gnnfleet init`` writes."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from launcher.init.choose import Choice, GraphDraft, free
from launcher.init.discover import Discovery, Environment, HostFacts
from launcher.init.questions import reason
from launcher.init.request import InitRequest
from launcher.node.exit_description import size
from launcher.text import OWN_VENV, count

_COLUMN = 40  #: where comments after a text begin

_WIDTH = 118  #: characters; longer comments are wrapped

STEPS, STEPS_OF_EPOCH, MOST_EPOCHS = 300, 12, 100  #: of a drafted training, at least, as far as so many epochs suffice


@dataclass(frozen=True)
class Line:
    """A line of the file and its comment. A line without text is a comment only."""

    text: str = ""
    comment: str = ""


def _rendered(line: Line) -> Iterator[str]:
    if not line.comment:
        yield line.text.rstrip()
        return
    one_line = f"{line.text:<{_COLUMN - 1}} # {line.comment}"
    if line.text.strip() and len(one_line) <= _WIDTH:
        yield one_line
        return
    indent = " " * (len(line.text) - len(line.text.lstrip())) + "# "
    yield from textwrap.wrap(
        line.comment, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    if line.text.strip():
        yield line.text


def value(plain: Any) -> str:
    """Return a value as YAML in flow style, on one line."""
    if isinstance(plain, int) and not isinstance(plain, bool) and plain >= 10_000:
        return f"{plain:_}"
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{key}: {value(item)}" for key, item in plain.items()) + "}"
    if isinstance(plain, (list, tuple)):
        return "[" + ", ".join(map(value, plain)) + "]"
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()


_SIGNED = re.compile(r"(# Written by `gnnfleet init`[^\n]*) Unedited: ([0-9a-f]{12})\n(.*)", re.DOTALL)


def is_unedited(path: Path) -> bool:
    """Whether ``gnnfleet init`` wrote the file and nobody edited it since."""
    try:
        found = _SIGNED.fullmatch(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    return found is not None and found[2] == _digest(found[1], found[3])


def _digest(head: str, rest: str) -> str:
    return sha256(f"{head}\n{rest}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Draft:
    """Contents of the new cluster.yml. Nodes are keyed by their index in ``request.hosts``."""

    request: InitRequest
    discovery: Discovery
    chosen: Choice  #: environment of each node
    devices: Mapping[int, tuple[int, ...]]  #: CUDA ids of each node
    graph: GraphDraft
    file: str  #: name of the file, for the commands in its comments
    program: str = "gnnfleet"  #: command that starts gnnfleet, for the same

    @property
    def world(self) -> int:
        """Number of training processes."""
        return sum(len(ids) or 1 for ids in self.devices.values())

    @property
    def default(self) -> Environment | None:
        """The environment that most nodes use, for section ``defaults``; None if no node has an environment."""
        found = [one for one in self.chosen.values() if one]
        places = [(one.key, one.path) for one in found]
        return max(found, key=lambda one: places.count((one.key, one.path)), default=None)

    @property
    def shared_confirmed(self) -> bool:
        """Whether all hosts share the folder of ``--shared``; True without this option, or with a single host."""
        shared, facts = self.request.shared, list(self.discovery.facts.values())
        if not shared or len(facts) < 2:
            return True
        return (facts[0].home + shared[1:] if shared[0] == "~" else shared) in self.discovery.shared


def text_of(draft: Draft) -> str:
    """Return the text of the file, with a digest at the end of its first line, which ``is_unedited`` checks."""
    sections = (_cluster(draft), _data(draft), _train(draft))
    lines = [text for section in sections for line in [*section, Line()] for text in _rendered(line)]
    head, _, rest = ("\n".join(lines).rstrip("\n") + "\n").partition("\n")
    return f"{head} Unedited: {_digest(head, rest)}\n{rest}"


def _cluster(draft: Draft) -> Iterator[Line]:
    """Yield the lines before ``data``: name, access, ``defaults`` and ``nodes``."""
    request, default, today = draft.request, draft.default, time.strftime("%Y-%m-%d")
    yield Line("", f"Written by `gnnfleet init` on {today}, for the hosts as found then; see docs/config.md.")
    launch = f"#   {draft.program} --config {draft.file}"
    check = f"#   {draft.program} check --config {draft.file}"
    yield Line(f"{check:<{len(launch) + 10}}    checks the hosts and the network between them")
    yield Line(f"{launch} --dry-run    shows the plan without connecting to a host")
    yield Line(f"{launch}              launches a run")
    yield Line()
    yield Line("name: cluster", "prefix of run ids")
    if request.local:
        yield Line("transport: local", "all nodes are on this machine, without SSH")
    elif request.host_keys:
        yield Line(
            f"host_keys: {request.host_keys}", "unknown SSH host keys: strict refuses them, accept-new stores them"
        )
    yield Line()

    yield Line("defaults:", "apply to every node; keys of a node take precedence")
    for name, plain in request.login.items():
        yield Line(f"  {name}: {value(plain)}")
    if request.environment:
        [(key, text)] = request.environment.items()
        yield Line(f"  {key}: {value(text)}", _versions(default) if default else "not found on the hosts yet")
    elif request.local:
        yield Line("  # venv: ~/gnnfleet-venv", "environment of the runs; default: the one that runs gnnfleet")
    elif default:
        yield Line(f"  {default.key}: {value(default.path)}", _versions(default))
    else:
        yield Line(f"  venv: {OWN_VENV}", "made by `gnnfleet setup`: no Python with torch was found")
    yield Line("  workdir: ~/gnnfleet-work/node{node_rank}", "folder on the node for code, parts and runs")
    yield Line("  # procs: 2", "training processes on a node without devices; default: 1")
    yield Line()

    yield Line("nodes:", "in node_rank order; the first one is the lead node")
    for k, host in enumerate(request.hosts):
        error = draft.discovery.errors.get(k)
        if error:
            why = reason(request, k, error).replace("\n", " ")
            yield Line("  ", f"Left out: {why}")
            yield Line(f"  # - {value(host)}")
        else:
            facts, chosen, devices = draft.discovery.facts[k], draft.chosen[k], draft.devices[k]
            own = None  # an environment other than that of ``defaults``
            if chosen and default and not (request.environment or request.local):
                own = chosen if (chosen.key, chosen.path) != (default.key, default.path) else None
            machine = f"{count(facts.cpus, 'CPU')}, {size(facts.memory)}" + ("" if facts.gpus else ", no GPU")
            keys = bool(own or devices)
            yield Line(f"  - host: {value(host)}" if keys else f"  - {value(host)}", machine)
            if own:
                yield Line(f"    {own.key}: {value(own.path)}", _versions(own))
            if devices:
                names = [gpu.name for gpu in facts.gpus if gpu.index in set(devices)]
                kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
                yield Line(f"    devices: {value(devices)}", f"{kinds}; one process each")
            for remark in _remarks(facts, chosen):
                yield Line("    ", remark)


def _versions(environment: Environment) -> str:
    shown = [
        f"{name} {environment.versions[name]}"
        for name in ("python", "torch", "torch_geometric")
        if environment.versions.get(name)
    ]
    return ", ".join(shown)


def _remarks(facts: HostFacts, chosen: Environment | None) -> Iterator[str]:
    if chosen is None:
        yield "no Python with torch was found on this host"
    elif chosen.lacking:
        yield f"its Python lacks {', '.join(chosen.lacking)}"
    if facts.gpus and chosen and not chosen.versions.get("cuda"):
        names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in facts.gpus)
        yield f"trains on the CPU: its torch {chosen.versions['torch']} is built without CUDA; GPUs: {names}"
        return
    for gpu in facts.gpus:
        if gpu.mig:
            yield f"device {gpu.index} is divided (MIG) and left out"
        elif not free(gpu):
            used = f"{size(gpu.used << 20)} of its {size(gpu.memory << 20)}"
            yield f"device {gpu.index} is left out: other processes use {used}"


def _data(draft: Draft) -> Iterator[Line]:
    graph, request, discovery = draft.graph, draft.request, draft.discovery
    yield Line("data:")
    yield Line(f"  dataset: {value(graph.dataset)}", graph.about)
    if graph.source:
        yield Line(f"  source: {value(graph.source)}", "on this machine")
    if graph.dataset == "tables":
        yield from _tables(graph)
    elif graph.options:
        yield Line(f"  options: {value(dict(graph.options))}")
    elif graph.dataset != "synthetic-hetero":
        yield Line("  # options: {undirected: true}", "adds the reverse of every edge; more in docs/data.md")
    if request.shared:
        folder = f"{request.shared}/parts/{graph.short_name}"
        yield from _folder(draft, folder, "path on the nodes")
        yield Line("  mode: verify", "the nodes read the parts in place; make them with `gnnfleet partition make`")
        yield Line(f"  num_parts: {len(discovery.facts)}")
        if not draft.shared_confirmed:
            yield Line("  ", f"{request.shared} is not the same writable folder on all nodes")
        return
    sent = "parts are made here" if request.local else "parts are made here on this machine, then sent to the nodes"
    if "links" not in graph.comments:
        yield from _folder(draft, f"parts/{graph.short_name}", sent)
    if discovery.shared and not request.local:
        where = " and this machine" if discovery.shared_here else ""
        place = (discovery.shared_here or discovery.shared)[0]
        parts = f"`folder: {place}/parts/{graph.short_name}`"
        how = "with {} and `mode: verify` no parts are copied (gnnfleet init --template shared_folder)"
        yield Line("  ", f"{place} is shared by all nodes{where}: " + how.format(parts))
    if "links" in graph.comments:  # last, so that no other comment follows what is to be uncommented
        yield from _folder(draft, f"parts/{graph.short_name}", sent)


def _folder(draft: Draft, folder: str, about: str) -> Iterator[Line]:
    """Yield the line of the folder of the parts, and as a comment that of the drafted recommendations."""
    if "links" not in draft.graph.comments:
        yield Line(f"  folder: {value(folder)}", about)
        return
    yield Line("  # BEGIN")
    yield Line(f"  folder: {value(folder)}", about)
    yield Line("  # END")
    yield Line(f"  # folder: {value(folder + '-links')}")


def _tables(graph: GraphDraft) -> Iterator[Line]:
    options, comments = graph.options, graph.comments
    yield Line("  options:", "drafted from the files; all keys are in docs/data.md")
    for text in comments.get("unused", ()):
        yield Line("    ", text)
    links = comments.get("links")
    if links:
        source, _, target = links["name"].split("__")
        instead = f"To recommend {target} nodes to {source} nodes instead of predicting {next(iter(options['tasks']))}:"
        yield Line("    ", f"{instead} delete from BEGIN to END, here and in train, and uncomment the lines after END")
    for kind in ("nodes", "edges", "tasks"):
        if kind not in options:
            continue
        yield Line(f"    {kind}:")
        for k, (name, table) in enumerate(options[kind].items()):
            if links and kind == "nodes" and k == 2:
                yield Line("      # BEGIN")
            yield Line(f"      {name}:" + ("" if table else " {}"))
            for key, plain in table.items():
                yield Line(f"        {key}: {value(plain)}")
            for text in comments.get(kind, {}).get(name, ()):
                yield Line("        ", text)
        if (
            kind == "nodes"
            and any(options[kind].values())
            and not any("label" in table for table in options[kind].values())
            and not options.get("tasks")
        ):
            yield Line("        # label: COLUMN", "a column to predict; take it out of features and one_hot")
            if _predicts_links(options):
                yield Line("        # split: {train: 0.8, val: 0.1, test: 0.1}", "with a label; remove hold_out below")
    for name in ("num_classes", "target"):
        if name in options:
            yield Line(
                f"    {name}: {value(options[name])}", {"num_classes": "labels are numbers, not classes"}.get(name, "")
            )
    if links:
        yield Line("    # END")
        yield Line("    # edges:")
        yield Line(f"    #   {links['name']}:", "of the tables that link the two, the one with most rows")
        for key, plain in links["table"].items():
            yield Line(f"    #     {key}: {value(plain)}")
        yield Line(f"    # hold_out: {links['name']}")
        if "time" in links["table"]:
            yield Line("    # hold_out_time: edge_time", "the latest links are for validation and test")
    if options.get("undirected"):
        yield Line("    undirected: true", "adds the reverse of every edge, so that every type receives messages")
    if options.get("tasks"):
        return
    link, timed = _link_type(options)
    if any(_is_split(table) for table in options["edges"].values()):
        if _predicts_links(options):
            yield Line("    ", "links for val and test are those of the split; without it, `hold_out` draws them")
    elif _predicts_links(options):
        yield Line(f"    hold_out: {link}", "no table has labels, so links of this type are predicted")
        if timed:
            yield Line("    hold_out_time: edge_time", "the latest links are for validation and test")
    elif not any("label" in table for table in options["nodes"].values()):
        yield Line(f"    # hold_out: {link}", "or predict links of this type, with train.task: link")


def _predicts_links(options: Mapping[str, Any]) -> bool:
    """Return whether the drafted run trains link prediction: no table has a column of labels, or splits of nodes."""
    return not options.get("tasks") and not any(
        key in table for table in options["nodes"].values() for key in ("label", "split")
    )


def _is_split(table: Mapping[str, Any]) -> bool:
    return any(key in table for key in ("split", "val_files", "test_files"))


def _link_type(options: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the edge type of the first edge table, if possible with a split, and whether its edges have times."""
    (node, *others), (first, *more) = options["nodes"], options["edges"]
    name = next((name for name, table in options["edges"].items() if _is_split(table)), first)
    timed = "time" in options["edges"][name]
    if "__" in name:
        return str(name), timed
    return f"{node}__{name}__{node}" if others or more else "node__to__node", timed


def pace(rows: int | None, world: int, per_process: int, epochs: int) -> tuple[int, int]:
    """Return the batch size of ``world`` processes together, and the number of epochs, for training on ``rows`` rows.

    Few rows make smaller batches and more epochs, as a model needs some hundreds of steps, however small its data.
    ``rows`` is None if their number is not known, as of graphs that are no tables.
    """
    batch = max(2 * per_process, per_process * world)
    if not rows:
        return batch, epochs
    train = max(1, int(0.7 * rows))
    batch = min(batch, max(64, 16 * world, 1 << (train // STEPS_OF_EPOCH).bit_length()))
    return batch, min(MOST_EPOCHS, max(epochs, -(-STEPS // -(-train // batch))))


def _train(draft: Draft) -> Iterator[Line]:
    hetero, options, world = draft.graph.hetero, draft.graph.options, draft.world
    links = draft.graph.dataset == "tables" and _predicts_links(options)
    yield Line("train:", "for the bundled trainer; give your own script after -- on the command line")
    tasks = options.get("tasks", {})
    if tasks and not any("label" in table for table in options["nodes"].values()):
        yield from _train_task(draft)
        return
    if tasks:
        labelled = next(of for of, table in options["nodes"].items() if "label" in table)
        yield Line(f"  target: {labelled}", f"or {', '.join(tasks)}, as docs/data.md describes under Task tables")
    tables = [*options.get("edges" if links else "nodes", {}).values()]
    learned = next((table for table in tables if _is_split(table) or "label" in table), tables[0] if links else {})
    rows = draft.graph.comments.get("rows", {}).get(learned.get("files"))
    batch, epochs = pace(rows, world, 512, 20 if links else 10)
    if links:
        yield Line("  task: link")
        if _link_type(options)[1]:
            yield Line("  time_attr: edge_time", "a batch has no edges later than the links that it predicts")
    if links and any("relation" in table for table in options["edges"].values()):
        yield Line("  model: embedding", "rows of the nodes alone; with neighbours: rgcn, hgt or rsage")
        yield Line("  decoder: complex", "or distmult, transe, rotate")
        yield Line("  negatives: 256", "nodes per step to which links are compared")
        yield Line("  eval_negatives: all", "held-out links are ranked among all nodes, less those that are known")
        yield Line("  metrics: [mrr, hits@1, hits@10]", "the first one chooses the best epoch")
        yield Line("  hidden: 64")
        yield Line(f"  batch_size: {batch}", "over all processes together")
        yield Line(f"  epochs: {epochs}")
        yield Line("  lr: 0.01")
        return
    roles = ("features", "one_hot", "categories")
    plain = links and not _link_type(options)[1]
    if plain and not any(role in table for table in options["nodes"].values() for role in roles):
        yield Line("  model: lightgcn", "embeddings alone, as no table of nodes has features; with some: rsage")
        yield Line("  loss: bpr", "or softmax")
        yield Line("  negatives: 256", "targets per step to which links are compared")
        yield Line("  eval_negatives: all", "held-out links are ranked among all targets that are new to their source")
        yield Line("  metrics: [recall@20, ndcg@20]", "the first one chooses the best epoch")
        yield Line("  hidden: 64")
        yield Line("  fanouts: [20, 10]", "neighbours per hop; -1: all")
        batch, epochs = pace(rows, world, 1024, 30)
        yield Line(f"  batch_size: {batch}", "over all processes together")
        yield Line(f"  epochs: {epochs}")
        yield Line("  lr: 0.01")
        return
    if links:
        yield Line("  model: rsage", "or rgcn, hgt; a link's targets have trainable rows beside their features")
        yield Line("  negatives: 512", "targets per step that links are ranked among; all, if there are fewer")
        yield Line("  dropout: 0.0", "dropped values blur the order of targets")
    else:
        yield Line(f"  model: {'rgcn' if hetero else 'sage'}", "or rsage, hgt" if hetero else "or gcn, gat")
    yield Line("  hidden: 64" if hetero else "  hidden: 128")
    yield Line(
        f"  fanouts: {'[8, 4]' if hetero else '[15, 10]'}",
        f"neighbours per hop{', of each edge type' if hetero else ''}",
    )
    yield Line(f"  batch_size: {batch}", "over all processes together")
    yield Line(f"  epochs: {epochs}")
    yield Line(f"  lr: {0.003 if links else 0.005}")


def _train_task(draft: Draft) -> Iterator[Line]:
    """Yield the lines of ``train`` for the first task table, and those for recommendations as comments."""
    options, comments = draft.graph.options, draft.graph.comments
    target, task = next(iter(options["tasks"].items()))
    kind, metrics = comments["learn"]
    if links := comments.get("links"):
        yield Line("  # BEGIN")
    yield Line(f"  target: {target}", f"rows of {value(task['table'])}; gnnfleet infer writes their predictions")
    yield Line(f"  task: {kind}")
    yield Line(f"  metrics: {value(metrics)}", "the first one chooses the best epoch")
    yield Line("  model: rsage", "or rgcn, hgt")
    yield Line("  hidden: 64")
    if kind == "link":
        yield Line("  eval_negatives: all", f"the list of a row is ranked among all {task['targets']} nodes")
        yield Line("  negatives: 512", "targets per step, for the loss; all, if there are fewer")
        yield Line("  dropout: 0.0", "dropped values blur the order of targets")
        yield Line("  fanouts: [15, 15, 10]", f"the {task['entity']} of a row; neighbours per hop, of each edge type")
    else:
        yield Line("  fanouts: [1, 15, 10]", f"the {task['entity']} of a row; neighbours per hop, of each edge type")
    yield Line("  time_attr: time", "nodes later than a row are not seen")
    yield Line("  temporal_strategy: last", "the latest neighbours; uniform: random ones")
    batch, epochs = pace(comments["rows"][task["table"]], draft.world, 256, 10)
    yield Line(f"  batch_size: {batch}", "over all processes together")
    yield Line(f"  epochs: {epochs}")
    yield Line("  lr: 0.005")
    if links:
        batch, epochs = pace(comments["rows"][links["table"]["files"]], draft.world, 512, 20)
        yield Line("  # END")
        for line in (
            "task: link",
            f"target: {links['name']}",
            "model: lightgcn",
            "hidden: 64",
            "fanouts: [-1, -1]",
            "loss: bpr",
            "negatives: 256",
            "eval_negatives: all",
            "metrics: [recall@20, ndcg@20]",
            f"batch_size: {batch}",
            f"epochs: {epochs}",
            "lr: 0.01",
        ):
            yield Line(f"  # {line}")
