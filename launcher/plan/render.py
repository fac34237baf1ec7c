"""Prints a plan: host, processes, environment and files of each node. Similar nodes are shown together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.command import Command, Secret, quote
from launcher.config.schema import TrainConfig, login_text
from launcher.hostlist import fold
from launcher.plan.model import LaunchPlan, NodePlan, Partitioning, PlannedFile
from launcher.text import count, spans

LabelledLines = Sequence[tuple[str, str]]  #: lines about one node, as (label, text)

_WORD = re.compile(r"([\w.-]+)")

_NUMBER = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class Fold:
    """Similar nodes that are shown together: their lines in the plan differ only in values such as rank and address.

    ``rows``: their lines, with placeholders such as ``{node_rank}`` for these values (see ``own_values``).
    """

    nodes: tuple[NodePlan, ...]
    rows: LabelledLines


@dataclass(frozen=True)
class _SplitRows:
    """The lines of one node, each split into text (even indices) and numbers or addresses (odd indices)."""

    node: NodePlan
    names: tuple[str, ...]
    pieces: tuple[tuple[str, ...], ...]


def fold_nodes(listed: Sequence[tuple[NodePlan, LabelledLines]]) -> list[Fold]:
    """Group nodes whose lines in the plan differ only in their ``own_values``, in order of their first node.

    ``listed``: each node with its lines. If the ``own_values`` of a node are inserted into its Fold, the result is
    exactly the lines of the node.
    """
    addresses = {node.address for node, _ in listed}
    alike: dict[object, list[_SplitRows]] = {}
    for node, rows in listed:
        pieces = tuple(tuple(_pieces(text, addresses)) for _, text in rows)
        one = _SplitRows(node, tuple(name for name, _ in rows), pieces)
        alike.setdefault((one.names, tuple(cut[::2] for cut in pieces)), []).append(one)
    folds = [fold for group in alike.values() for fold in _folds(group)]
    return sorted(folds, key=lambda fold: fold.nodes[0].node_rank)


def own_values(node: NodePlan) -> Mapping[str, str]:
    """Return the values that may differ between nodes of one ``Fold``, by placeholder such as ``{node_rank}``.

    For equal values, the plan shows the placeholder that comes first in the result.
    """
    return {
        "{node_rank}": str(node.node_rank),
        "{service_port}": str(node.service_port),
        **_ends("rank", node.ranks),
        **_ends("part", node.parts),
        "{address}": node.address,
        **_inner("rank", node.ranks),
        **_inner("part", node.parts),
        **({} if node.trainer_index is None else {"{trainer_index}": str(node.trainer_index)}),
    }


def _ends(name: str, numbers: Sequence[int]) -> Mapping[str, str]:
    return {f"{{first_{name}}}": str(numbers[0]), f"{{last_{name}}}": str(numbers[-1])} if numbers else {}


def _inner(name: str, numbers: Sequence[int]) -> Mapping[str, str]:
    return {f"{{first_{name}+{i}}}": str(number) for i, number in enumerate(numbers) if i}


def _pieces(text: str, addresses: Set[str]) -> Iterator[str]:
    """Yield the pieces of ``text``: plain text (even indices), and numbers or addresses of nodes (odd indices)."""
    plain = ""
    for i, word in enumerate(_WORD.split(text)):
        if i % 2 and word in addresses:
            yield plain
            yield word
            plain = ""
            continue
        first, *more = _NUMBER.split(word)
        plain += first
        for number, after in zip(more[::2], more[1::2], strict=True):
            yield plain
            yield number
            plain = after
    yield plain


def _folds(group: list[_SplitRows]) -> Iterator[Fold]:
    """Yield a Fold of nodes with equal text in their lines; several Folds if values not in ``own_values`` differ."""
    own = [own_values(one.node) for one in group]
    names = {name: [values.get(name) for values in own] for name in own[0]}
    rows = []
    for r, title in enumerate(group[0].names):
        shown = list(group[0].pieces[r])
        for i in range(1, len(shown), 2):
            values = [one.pieces[r][i] for one in group]
            if any(value != values[0] for value in values):
                name = next((name for name, owned in names.items() if owned == values), None)
                if name is None:
                    for value in dict.fromkeys(values):
                        yield from _folds([one for one in group if one.pieces[r][i] == value])
                    return
                shown[i] = name
        rows.append((title, "".join(shown)))
    yield Fold(tuple(one.node for one in group), tuple(rows))


_Block = tuple[Sequence[NodePlan], Sequence[tuple[str, str]]]

_MANY = 4  # from this number of nodes on, only the smallest and the largest value are shown

_FOLDED = "equal nodes are shown once; {node_rank} and other names in { } stand for each node's values in this table"

_FULL = "commands and environment of each node: --verbose; everything as JSON: --json"


def print_plan(plan: LaunchPlan, console: Console, *, every: bool = False) -> None:
    """Print a plan: a summary, then the nodes; similar nodes are shown together.

    ``every``: show each node separately, with its full commands. Lines are not wrapped, so that they can be copied.
    """
    lines = [_heading(_summary(plan)), *map(_row, _run_rows(plan, full=every)), *_placement(plan)]
    for nodes, rows in _each(plan) if every else _folded(plan):
        lines += [Text(""), _heading(_title(nodes)), *map(_row, rows)]
    console.print(Text("\n").join(lines), soft_wrap=True)


def _each(plan: LaunchPlan) -> Iterator[_Block]:
    for node in plan.nodes:
        yield (node,), list(_node_rows(node))


def _folded(plan: LaunchPlan) -> Iterator[_Block]:
    for one in fold_nodes([(node, list(_node_rows(node, sizes=False))) for node in plan.nodes]):
        yield one.nodes, _short(one.rows if len(one.nodes) > 1 else list(_node_rows(one.nodes[0])))


def _title(nodes: Sequence[NodePlan]) -> str:
    """Return the heading of nodes: ``node[0-63]  alice@gpu[01-64].lab  tmux session …``."""
    ranks, targets = fold(f"node{node.node_rank}" for node in nodes), fold(node.target for node in nodes)
    session = nodes[0].session
    if len(nodes) > 1:
        session = session[: -len(str(nodes[0].node_rank))] + "{node_rank}"
    kind = f"step of job {nodes[0].slurm_job}:" if nodes[0].slurm_job else "tmux session"
    return f"{ranks}  {targets}  {kind} {session}"


def print_placement(plan: LaunchPlan, console: Console) -> None:
    lines = [_heading(_summary(plan)), *_placement(plan)]
    lines += [_row(("topology", _topology(plan)))] if plan.topology.why else []
    lines += [_row(("sampling", plan.sampling))] if plan.sampling else []
    console.print(Text("\n").join(lines), soft_wrap=True)


def _placement(plan: LaunchPlan) -> list[Text]:
    """Return a table with a line for each node: target, ranks, devices, parts, address, files.

    If nodes have other roles than worker, or parts have several holders, the table also shows role, copies, bytes of
    parts and home server.
    """
    roles = _has_roles(plan)
    extra = ("role", "copies", "part data", "asks first") if roles else ("", "", "", "")
    titles = ("node", "target", extra[0], "ranks", "devices", "parts", *extra[1:], "address", "files")
    lines = [titles, *(_placed(node) for node in plan.nodes)]
    columns = [column for column in zip(*lines, strict=True) if column[0] and {*column[1:]} != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    rows = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]
    return [Text(rows[0], "dim"), *map(Text, rows[1:])]


def _placed(node: NodePlan) -> tuple[str, ...]:
    address = login_text(None, node.address, node.service_port if node.server else None)
    devices = _devices(node) if node.ranks else "-"
    first = [part for part in node.parts if part not in set(node.copies)]
    share = (node.role, _span(node.ranks), devices, _span(first), _span(node.copies), _bytes_of_parts(node))
    return (f"node{node.node_rank}", node.target, *share, node.home or "-", address, decimal(_total(node.files)))


def _has_roles(plan: LaunchPlan) -> bool:
    return any(node.role != "worker" or node.copies for node in plan.nodes)


def _bytes_of_parts(node: NodePlan) -> str:
    """Return the size of the part files that are sent to the node; ``-`` if unknown or none."""
    top = f"{node.data_dir}/part"
    size = _total([file for file in node.files if node.parts and file.dest.startswith(top)])
    return decimal(size) if size else "-"


def _total(files: Sequence[PlannedFile]) -> int:
    return sum(file.bytes for file in files)


def describe_command(command: Command) -> str:
    """Return the words of a command, quoted for a shell; secrets are shown as ``***``."""
    return " ".join(_word(word) for word in command.argv)


def describe_env(env: Mapping[str, str]) -> str:
    """Return environment variables as ``A=1 B='two words'``, sorted; secrets are shown as ``***``."""
    return " ".join(f"{name}={_word(value)}" for name, value in sorted(env.items()))


def file_groups(node: NodePlan) -> dict[str, list[PlannedFile]]:
    """Return a node's files in four groups: code, parts, own (the user's), generated."""
    groups: dict[str, list[PlannedFile]] = {"code": [], "parts": [], "own": [], "generated": []}
    tops = {"code": node.code_dir + "/", "own": f"{node.run_dir}/files/"}
    tops |= {"parts": node.data_dir + "/"} if node.data_dir else {}
    for file in node.files:
        named = next((name for name, top in tops.items() if file.dest.startswith(top)), "generated")
        groups["own" if named == "generated" and file.source else named].append(file)
    return groups


def _summary(plan: LaunchPlan) -> str:
    parts = count(plan.num_parts, "part")
    if plan.serve_only:
        return f"serving cluster {plan.run_id}: {count(len(plan.nodes), 'graph server')}, {parts}"
    if plan.serving:
        parts = f"parts of serving cluster {plan.serving}"
    counts = f"{count(len(plan.nodes), 'node')}, {count(plan.world_size, 'process', 'es')}, {parts}"
    return f"run {plan.run_id}: {counts}, master {plan.master_addr} port {plan.master_port}"


def _run_rows(plan: LaunchPlan, *, full: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the lines about the whole run. ``full``: show the partitioner's command line instead of a sentence."""
    if made := plan.partition:
        first = f"{describe_env(made.command.env)} {describe_command(made.command)}"
        yield "partition", first if full else _describe_partitioning(plan, made)
    if plan.own_command:
        yield "training", describe_command(Command(plan.own_command))
    elif plan.train:
        yield "training", _describe_training(plan, plan.train)
    total = sum(_total(node.files) for node in plan.nodes)
    yield "code", f"digest {plan.code_digest[:16]}"
    yield "transfer", f"{decimal(total)} in {count(sum(len(node.files) for node in plan.nodes), 'file')} to all nodes"
    if fetched := sum(file.bytes for node in plan.nodes for file in node.files if file.url):
        yield (
            "store",
            f"{decimal(fetched)} of it fetched by the nodes from {plan.partition.store if plan.partition else ''}",
        )
    if plan.control_port:
        yield "control", f"node{plan.lead}, port {plan.control_port}"
    yield "results", f"{plan.runs_dir}/{plan.run_id} on this machine"
    if plan.topology.why:
        yield "topology", _topology(plan)
    if plan.sampling:
        yield "sampling", plan.sampling
    for note in plan.notes:
        yield "note", note
    if not full:
        yield "details", _FULL
        if len(plan.nodes) > 1:
            yield "nodes", _FOLDED


def _describe_partitioning(plan: LaunchPlan, made: Partitioning) -> str:
    """Return the sentence ``synthetic is partitioned into 3 parts (metis) in parts/toy on this machine, …``."""
    parts = count(plan.num_parts, "part")
    where = f"{made.folder} on this machine"
    if made.store:
        where += f" and uploaded to {made.store}"
    if made.method == "keep":
        return f"the {parts} in {made.source} are converted to {where}, unless they exist"
    return f"{made.source} is partitioned into {parts} ({made.method}) in {where}, unless they exist"


def _describe_training(plan: LaunchPlan, train: TrainConfig) -> str:
    """Return the sentence ``the bundled trainer: sage, hidden 256, fanouts 15,10,5, …``."""
    batch = f"batches of {train.batch_size} seeds over {count(plan.world_size, 'process', 'es')}"
    shape = f"{train.model}, hidden {train.hidden}, fanouts {','.join(map(str, train.fanouts))}"
    return f"the bundled trainer: {shape}, {batch}, {count(train.epochs, 'epoch')}"


def _topology(plan: LaunchPlan) -> str:
    """Return the sentence ``replicated (auto: the edges of all parts take 34.2 MB); 17.1 MB more for node0, …``."""
    text = f"{plan.topology.choice} ({plan.topology.why})" if plan.topology.choice else plan.topology.why
    more = {f"node{node.node_rank}": node.topology_bytes for node in plan.nodes if node.topology_bytes}
    if not more:
        return text
    if len(more) < _MANY:
        first, *rest = (f"{decimal(size)} for {name}" for name, size in more.items())
        return f"{text}; {', '.join([first.replace(' for', ' more for'), *rest])}"
    return f"{text}; {decimal(min(more.values()))} to {decimal(max(more.values()))} more for each node"


def _short(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [row for row in rows if row[0] not in ("share", "start", "server", "trainer", "  env")]


def _node_rows(node: NodePlan, *, sizes: bool = True) -> Iterator[tuple[str, str]]:
    yield "share", "  ".join(_share(node))
    parts = f"  parts {node.data_dir}" if node.data_dir else ""
    yield "folders", f"run {node.run_dir}{parts}  code {node.code_dir}"
    for line in node.start.setup:
        yield "setup", line
    yield "env", describe_env(node.start.env)
    yield "start", describe_command(node.start)
    for name, command in (("server", node.server), ("trainer", node.trainer)):
        if command:
            yield name, f"cd {quote(command.cwd)}; {describe_command(command)}"
            yield "  env", describe_env(_beyond(command.env, node.start.env))
    for name, files in file_groups(node).items():
        if files:
            named = name in ("own", "generated")
            shown = _files(node, files, list_them=named) if sizes else _names(node, files, list_them=named)
            yield "files", f"{name}: {shown}"
    yield "logs", f"{node.run_dir}/logs: " + " ".join(log.rpartition("/")[2] for log in node.log_files)


def _share(node: NodePlan) -> Iterator[str]:
    if node.role != "worker":
        yield node.role
    if node.ranks:
        yield f"ranks {_span(node.ranks)}  devices {_devices(node)}"
    if node.parts:
        yield f"parts {_span(node.parts)}"
    if node.copies:
        yield f"of which copies {_span(node.copies)}"
    if node.home:
        yield f"asks first {node.home}"
    ports = [f"master {node.master_port}"] if node.ranks else []
    ports += [f"graph service {node.service_port}"] if node.server else []
    yield f"address {node.address}  ports {', '.join(ports)}"


def _beyond(env: Mapping[str, str], common: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if common.get(name) != value}


def _files(node: NodePlan, files: Sequence[PlannedFile], *, list_them: bool) -> str:
    total = decimal(_total(files))
    if not list_them:
        return f"{count(len(files), 'file')}, {total}"
    return ", ".join(f"{_name(node, file)} ({_size(file)})" for file in files) + f", {total}"


def _names(node: NodePlan, files: Sequence[PlannedFile], *, list_them: bool) -> str:
    return ", ".join(_name(node, file) for file in files) if list_them else count(len(files), "file")


def _name(node: NodePlan, file: PlannedFile) -> str:
    top = f"{node.run_dir}/files/"
    return file.dest.removeprefix(top) if file.dest.startswith(top) else file.dest.rpartition("/")[2]


def _size(file: PlannedFile) -> str:
    return decimal(file.bytes) if file.sha256 else "made at launch"


def _word(word: str) -> str:
    return str(word) if isinstance(word, Secret) else quote(word)


def _devices(node: NodePlan) -> str:
    return ",".join(map(str, node.devices)) or "CPU"


def _span(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as ``0-3`` and ``0,3-4``; ``-`` for none."""
    return spans(numbers).replace("–", "-").replace(" ", "") or "-"


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _row(row: tuple[str, str]) -> Text:
    return Text.assemble((f"  {row[0]:<11} ", "dim"), row[1])
