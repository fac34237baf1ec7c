"""Prints a plan: host, processes, environment and files of each node. Similar nodes are shown together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.command import Command, Secret, is_secret, quote
from launcher.config.schema import login_text
from launcher.hostlist import fold
from launcher.plan.model import LaunchPlan, NodePlan, PlannedFile
from launcher.text import count, spans

_Rows = Sequence[tuple[str, str]]  # lines about one node, as (label, text)

_Block = tuple[Sequence[NodePlan], _Rows]  # nodes that are shown together, and their lines

_Split = tuple[NodePlan, list[tuple[str, list[str]]]]  # a node and its lines: label, and pieces of the text

_WORD = re.compile(r"([\w.-]+)")

_NUMBER = re.compile(r"([0-9]+)")

_LARGE = 24  # from this number of nodes on, the table has a line for each group of nodes

_MOST_RANGES = 6  # ranges in a list of nodes or hosts

_MOST_ROWS = 16  # lines of the table of a large cluster

_MANY = 4  # from this number of nodes on, only the smallest and the largest value are shown

_MOST_BLOCKS = 2  # blocks of a large cluster that are shown in full; further ones are only named

_MOST_NAMED = 6

_FOLDED = "equal nodes are shown once; {node_rank} and other names in { } stand for each node's values in this table"

_FULL = "commands and environment of each node: --verbose; everything as JSON: --json"


def print_plan(plan: LaunchPlan, console: Console, *, every: bool = False) -> None:
    """Print a plan: a summary, then the nodes; similar nodes are shown together.

    ``every``: show each node separately, with its full commands. Lines are not wrapped, so that they can be copied.
    """
    lines = [_heading(_summary(plan)), *map(_row, _run_rows(plan, full=every)), *_placement_lines(plan)]
    blocks: list[_Block] = []
    if every:
        blocks = [((node,), list(_node_rows(plan, node))) for node in plan.nodes]
    else:
        for nodes, same in fold_nodes([(node, list(_node_rows(plan, node, sizes=False))) for node in plan.nodes]):
            rows = same if len(nodes) > 1 else list(_node_rows(plan, nodes[0]))
            short = [row for row in rows if row[0] not in ("share", "start", "server", "trainer", "  env")]
            blocks.append((nodes, short))
    full = len(blocks) if every or len(plan.nodes) < _LARGE else _MOST_BLOCKS
    for nodes, rows in blocks[:full]:
        lines += [Text(""), _heading(_title(nodes)), *map(_row, rows)]
    if further := blocks[full:]:
        lines += [Text(""), _heading("Nodes with other commands, environment or folders (--verbose shows each node)")]
        lines += [Text(f"  {_title(nodes)}") for nodes, _ in further[:_MOST_NAMED]]
        rest = sum(len(nodes) for nodes, _ in further[_MOST_NAMED:])
        lines += [Text(f"  … {count(rest, 'more node')}", "dim")] if rest else []
    console.print(Text("\n").join(lines), soft_wrap=True)


def fold_nodes(listed: Sequence[tuple[NodePlan, _Rows]]) -> list[_Block]:
    """Group nodes whose lines in the plan differ only in their ``own_values``, in order of their first node.

    ``listed``: each node with its lines. The lines of a group have placeholders such as ``{node_rank}``; with the
    ``own_values`` of one of its nodes inserted, they are exactly the lines of that node.
    """
    # Nodes have most words in common: each is split once, at its numbers, or is an address of a node.
    words = {node.address: ["", node.address, ""] for node, _ in listed}

    def pieces(text: str) -> list[str]:
        """Split ``text`` into plain text (even indices), and numbers or addresses of nodes (odd indices)."""
        found = [""]
        for word in _WORD.split(text):
            cut = words.get(word)
            if cut is None:
                cut = words[word] = _NUMBER.split(word)
            found[-1] += cut[0]
            found += cut[1:]
        return found

    alike: dict[object, list[_Split]] = {}
    for node, rows in listed:
        one = node, [(name, pieces(text)) for name, text in rows]
        alike.setdefault(tuple((name, *cut[::2]) for name, cut in one[1]), []).append(one)
    folds = [fold for group in alike.values() for fold in _folds(group)]
    return sorted(folds, key=lambda fold: fold[0][0].node_rank)


def own_values(node: NodePlan) -> Mapping[str, str]:
    """Return the values that may differ between nodes of one group, by placeholder such as ``{node_rank}``.

    For equal values, the plan shows the placeholder that comes first in the result.
    """
    numbered = {"rank": node.ranks, "part": node.parts}
    ends = ({f"{{first_{name}}}": own[0], f"{{last_{name}}}": own[-1]} for name, own in numbered.items() if own)
    inner = ({f"{{first_{name}+{i}}}": number for i, number in enumerate(own) if i} for name, own in numbered.items())
    values: dict[str, object] = {"{node_rank}": node.node_rank, "{service_port}": node.service_port}
    for more in ends:
        values |= more
    values["{address}"] = node.address
    for more in inner:
        values |= more
    if node.trainer:
        values["{trainer_index}"] = node.trainer.env["GROUP_RANK"]
    return {name: str(value) for name, value in values.items()}


def _folds(group: Sequence[_Split]) -> Iterator[_Block]:
    """Yield a group of nodes whose lines have equal text; several if other values than ``own_values`` differ."""
    own = [own_values(node) for node, _ in group]
    names = {name: [values.get(name) for values in own] for name in own[0]}
    rows = []
    for r, (title, first) in enumerate(group[0][1]):
        shown = list(first)
        for i in range(1, len(shown), 2):
            values = [split[r][1][i] for _, split in group]
            if any(value != values[0] for value in values):
                name = next((name for name, owned in names.items() if owned == values), None)
                if name is None:
                    for value in dict.fromkeys(values):
                        yield from _folds([one for one in group if one[1][r][1][i] == value])
                    return
                shown[i] = name
        rows.append((title, "".join(shown)))
    yield tuple(node for node, _ in group), rows


def _title(nodes: Sequence[NodePlan]) -> str:
    """Return the heading of nodes: ``node[0-63]  alice@gpu[01-64].lab  tmux session …``."""
    ranks = fold((f"node{node.node_rank}" for node in nodes), _MOST_RANGES)
    targets = fold((node.target for node in nodes), _MOST_RANGES)
    session = nodes[0].session
    if len(nodes) > 1:
        session = session[: -len(str(nodes[0].node_rank))] + "{node_rank}"
    kind = f"step of job {nodes[0].slurm_job}:" if nodes[0].slurm_job else "tmux session"
    return f"{ranks}  {targets}  {kind} {session}"


def print_placement(plan: LaunchPlan, console: Console) -> None:
    lines = [_heading(_summary(plan)), *_placement_lines(plan)]
    lines += [_row(("topology", _topology(plan)))] if plan.topology.why else []
    lines += [_row(("sampling", plan.sampling))] if plan.sampling else []
    console.print(Text("\n").join(lines), soft_wrap=True)


def _describe_command(command: Command) -> str:
    """Return the words of a command, quoted for a shell; secrets are shown as ``***``."""
    return " ".join(_word(word) for word in command.argv)


def _describe_env(env: Mapping[str, str]) -> str:
    """Return environment variables as ``A=1 B='two words'``, sorted; secrets are shown as ``***``."""
    return " ".join(
        f"{name}={'***' if is_secret(name, value) else _word(value)}" for name, value in sorted(env.items())
    )


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
        parts, where = count(plan.num_parts, "part"), f"{made.folder} on this machine"
        where += f" and uploaded to {made.store}" if made.store else ""
        if full:
            yield "partition", f"{_describe_env(made.command.env)} {_describe_command(made.command)}"
        elif made.method == "keep":
            yield "partition", f"the {parts} in {made.source} are converted to {where}, unless they exist"
        else:
            cut = f"partitioned into {parts} ({made.method})"
            yield "partition", f"{made.source} is {cut} in {where}, unless they exist"
    if plan.own_command:
        yield "training", _describe_command(Command(plan.own_command))
    elif plan.train:
        batch = f"batches of {plan.train.batch_size} seeds over {count(plan.world_size, 'process', 'es')}"
        by = plan.train.neighbors.name if plan.train.neighbors else "fanout"
        shape = f"{plan.train.model}, hidden {plan.train.hidden}, fanouts {','.join(map(str, plan.train.fanouts))}"
        shape += "" if by == "fanout" else f" by {by}"
        yield "training", f"the bundled trainer: {shape}, {batch}, {count(plan.train.epochs, 'epoch')}"
    total, files = sum(map(plan.sent_bytes, plan.nodes)), sum(map(plan.sent_files, plan.nodes))
    yield "code", f"digest {plan.code_digest[:16]}"
    yield "transfer", f"{decimal(total)} in {count(files, 'file')} to all nodes"
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


def _node_rows(plan: LaunchPlan, node: NodePlan, *, sizes: bool = True) -> Iterator[tuple[str, str]]:
    share = [node.role] if node.role != "worker" else []
    share += [f"ranks {_span_text(node.ranks)}  devices {_devices_text(node)}"] if node.ranks else []
    share += [f"parts {_span_text(node.parts)}"] if node.parts else []
    share += [f"of which copies {_span_text(node.copies)}"] if node.copies else []
    share += [f"asks first {node.home}"] if node.home else []
    ports = [f"master {plan.master_port}"] if node.ranks else []
    ports += [f"graph service {node.service_port}"] if node.server else []
    yield "share", "  ".join([*share, f"address {node.address}  ports {', '.join(ports)}"])
    parts = f"  parts {node.data_dir}" if node.data_dir else ""
    yield "folders", f"run {node.run_dir}{parts}  code {node.code_dir}"
    for line in node.start.setup:
        yield "setup", line
    yield "env", _describe_env(node.start.env)
    if node.wrap:
        yield "wrap", _describe_command(Command(node.wrap))
    yield "start", _describe_command(node.start)
    for name, command in (("server", node.server), ("trainer", node.trainer)):
        if command:
            yield name, f"cd {quote(command.cwd)}; {_describe_command(command)}"
            own = {name: value for name, value in command.env.items() if node.start.env.get(name) != value}
            yield "  env", _describe_env(own)
    # The node's files in three groups: parts, own (the user's), generated.
    groups: dict[str, list[PlannedFile]] = {"parts": [], "own": [], "generated": []}
    tops = {"own": f"{node.run_dir}/files/"}
    tops |= {"parts": node.data_dir + "/"} if node.data_dir else {}
    for file in node.files:
        group = next((name for name, top in tops.items() if file.dest.startswith(top)), "generated")
        groups["own" if group == "generated" and file.source else group].append(file)
    for name, files in {"code": plan.code, **groups}.items():
        if files:
            shown = count(len(files), "file")
            if name in ("own", "generated"):
                named = []
                for file in files:
                    size = f" ({decimal(file.bytes) if file.sha256 else 'made at launch'})" if sizes else ""
                    named.append(_name(node, file) + size)
                shown = ", ".join(named)
            yield "files", f"{name}: {shown}" + (f", {decimal(_total_bytes(files))}" if sizes else "")
    logs = ["supervisor", *(["runners"] if node.ranks else []), *(["server"] if node.server else [])]
    yield "logs", f"{node.run_dir}/logs: {' '.join(f'{log}.log' for log in [*logs, *(f'rank{k}' for k in node.ranks)])}"


def _name(node: NodePlan, file: PlannedFile) -> str:
    top = f"{node.run_dir}/files/"
    return file.dest.removeprefix(top) if file.dest.startswith(top) else file.dest.rpartition("/")[2]


def _word(word: str) -> str:
    return str(word) if isinstance(word, Secret) else quote(word)


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _row(row: tuple[str, str]) -> Text:
    return Text.assemble((f"  {row[0]:<11} ", "dim"), row[1])


def _placement_lines(plan: LaunchPlan) -> list[Text]:
    """Return a table with a line for each node: target, ranks, devices, parts, address, files.

    If nodes have other roles than worker, or parts have several holders, the table also shows role, copies, bytes of
    parts and home server. In a large cluster each line is about consecutive nodes of the same kind.
    """
    roles = any(node.role != "worker" or node.copies for node in plan.nodes)
    extra = ("role", "copies", "part data", "asks first") if roles else ("", "", "", "")
    titles = ("node", "target", extra[0], "ranks", "devices", "parts", *extra[1:], "address", "files")
    groups = _similar(plan.nodes) if len(plan.nodes) >= _LARGE else [[node] for node in plan.nodes]
    cut = groups[: _MOST_ROWS if len(groups) > _MOST_ROWS and len(plan.nodes) >= _LARGE else len(groups)]
    lines = [titles, *(_placed(plan, group) for group in cut)]
    columns = [column for column in zip(*lines, strict=True) if column[0] and {*column[1:]} != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    rows = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]
    more = sum(map(len, groups[len(cut) :]))
    rest = [Text(f"  … {count(more, 'more node')}: --verbose or --json", "dim")] if more else []
    return [Text(rows[0], "dim"), *map(Text, rows[1:]), *rest]


def _similar(nodes: Sequence[NodePlan]) -> list[list[NodePlan]]:
    """Split ``nodes`` into groups of consecutive nodes with equal role, devices and numbers of ranks and parts."""

    def kind(node: NodePlan) -> tuple[object, ...]:
        return node.role, node.devices, len(node.ranks), len(node.parts), len(node.copies), node.server is None

    return [list(group) for _, group in itertools.groupby(nodes, kind)]


def _placed(plan: LaunchPlan, nodes: Sequence[NodePlan]) -> tuple[str, ...]:
    """Return the cells of the line of ``nodes``, which are similar."""
    names = fold((f"node{node.node_rank}" for node in nodes), _MOST_RANGES)
    targets = fold((node.target for node in nodes), _MOST_RANGES)
    devices = _devices_text(nodes[0]) if nodes[0].ranks else "-"
    first = sorted({part for node in nodes for part in {*node.parts} - {*node.copies}})
    copies = sorted({part for node in nodes for part in node.copies})
    ranks = [rank for node in nodes for rank in node.ranks]
    share = (nodes[0].role, _span_text(ranks), devices, _span_text(first), _span_text(copies))
    of_parts = []  # bytes of the part files that are sent to each node; 0 if unknown or none
    for node in nodes:
        top = f"{node.data_dir}/part"
        of_parts.append(_total_bytes([file for file in node.files if node.parts and file.dest.startswith(top)]))
    homes = fold(dict.fromkeys(node.home for node in nodes), _MOST_RANGES)

    # ``10.0.0.1:29600`` for one node; for several ``10.0.0.[1-64]:29600-29663``
    ports = sorted({node.service_port for node in nodes if node.server})
    if len(nodes) == 1:
        address = login_text(None, nodes[0].address, ports[0] if ports else None)
    else:
        addresses = fold((node.address for node in nodes), _MOST_RANGES)
        address = f"{addresses}:{ports[0]}-{ports[-1]}" if len(ports) > 1 else ":".join([addresses, *map(str, ports)])
    sent = _sizes([plan.sent_bytes(node) for node in nodes])
    return (names, targets, *share, _sizes(of_parts), homes or "-", address, sent)


def _sizes(numbers: Sequence[int]) -> str:
    """Return bytes as text, as ``1.2 MB``, or ``1.2 MB to 3.4 GB`` if nodes differ; ``-`` for none."""
    texts = [decimal(number) if number else "-" for number in (min(numbers), max(numbers))]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _total_bytes(files: Sequence[PlannedFile]) -> int:
    return sum(file.bytes for file in files)


def _devices_text(node: NodePlan) -> str:
    return ",".join(map(str, node.devices)) or "CPU"


def _span_text(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as ``0-3`` and ``0,3-4``; ``-`` for none."""
    return spans(numbers).replace("–", "-").replace(" ", "") or "-"
