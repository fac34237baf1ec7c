"""The plan for a person: per node where it runs, what runs, with which environment, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.config import login_text
from launcher.hostranges import fold
from launcher.plan import LaunchPlan, NodePlan
from launcher.planfold import fold_nodes
from launcher.planned import PlannedFile
from launcher.script import Command, Secret, quote
from launcher.words import count

_Rows = Iterator[tuple[str, str]]

_MANY = 4  # nodes that are worth a fold
_FOLDED = (
    "those that differ only in values of their own are told once, with {node_rank}, {address} … in place of what this "
    "table has of each (--verbose lists every node in full, --json has all as data):"
)


def print_plan(plan: LaunchPlan, console: Console, *, every: bool = False) -> None:
    """Everything ``launch`` will do; lines are not wrapped, so commands can be copied.

    Four nodes and more that differ only in values of their own are told once, unless ``every`` one is asked for.
    """
    alike = [] if every else fold_nodes([(node, list(_node_rows(node, sizes=False))) for node in plan.nodes])
    blocks = [(one.nodes, one.rows) for one in alike if len(one.nodes) >= _MANY]
    folded = {node.node_rank for nodes, _ in blocks for node in nodes}
    lines = [_heading(_summary(plan)), *map(_row, _run_rows(plan))]
    if blocks:
        lines += [_row(("nodes", _FOLDED)), *_placement(plan)]
    blocks += [((node,), list(_node_rows(node))) for node in plan.nodes if node.node_rank not in folded]
    for nodes, rows in sorted(blocks, key=lambda block: block[0][0].node_rank):
        lines += [Text(""), _heading(_title(nodes)), *map(_row, rows)]
    console.print(Text("\n").join(lines), soft_wrap=True)


def _title(nodes: Sequence[NodePlan]) -> str:
    """``node0  alice@gpu01.lab  tmux session …``, ``node[0-63]  alice@gpu[01-64].lab  tmux session …``."""
    ranks, targets = fold(f"node{node.node_rank}" for node in nodes), fold(node.target for node in nodes)
    session = nodes[0].session
    if len(nodes) > 1:
        session = session[: -len(str(nodes[0].node_rank))] + "{node_rank}"
    return f"{ranks}  {targets}  tmux session {session}"


def print_placement(plan: LaunchPlan, console: Console) -> None:
    """The plan in a line per node, as a launch shows it; ``print_plan`` has all of it."""
    console.print(Text("\n").join([_heading(_summary(plan)), *_placement(plan)]), soft_wrap=True)


def _placement(plan: LaunchPlan) -> list[Text]:
    lines = [("node", "target", "ranks", "devices", "parts", "address", "files")]
    for node in plan.nodes:
        address = login_text(None, node.address, node.service_port if node.server else None)
        size = decimal(sum(file.bytes for file in node.files))
        share = (_span(node.ranks), _devices(node), _span(node.parts))
        lines.append((f"node{node.node_rank}", node.target, *share, address, size))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return [Text(rows[0], "dim"), *map(Text, rows[1:])]


def describe_command(command: Command) -> str:
    """The argv as a shell would take it; secrets as ``***``."""
    return " ".join(_word(word) for word in command.argv)


def describe_env(env: Mapping[str, str]) -> str:
    """``A=1 B='two words'``, sorted; secrets as ``***``."""
    return " ".join(f"{name}={_word(value)}" for name, value in sorted(env.items()))


def file_groups(node: NodePlan) -> dict[str, list[PlannedFile]]:
    """A node's files by what they are: code, parts, own (yours), generated."""
    groups: dict[str, list[PlannedFile]] = {"code": [], "parts": [], "own": [], "generated": []}
    tops = {"code": node.code_dir + "/", "parts": node.data_dir + "/", "own": f"{node.run_dir}/files/"}
    for file in node.files:
        named = next((name for name, top in tops.items() if file.dest.startswith(top)), "generated")
        groups["own" if named == "generated" and file.source else named].append(file)
    return groups


def _summary(plan: LaunchPlan) -> str:
    counts = f"{count(len(plan.nodes), 'node')}, {count(plan.world_size, 'process', 'es')}, "
    counts += count(plan.num_parts, "part")
    return f"run {plan.run_id}: {counts}, master {plan.master_addr} port {plan.master_port}"


def _run_rows(plan: LaunchPlan) -> _Rows:
    total = sum(file.bytes for node in plan.nodes for file in node.files)
    yield "code", f"digest {plan.code_digest[:16]}"
    yield "move", f"{decimal(total)} in {count(sum(len(node.files) for node in plan.nodes), 'file')} to all nodes"
    if plan.control_port:
        yield "nodes meet", f"at node0, port {plan.control_port}"
    yield "results", f"{plan.runs_dir}/{plan.run_id} on this machine"
    if plan.partition:
        yield "first, here", f"{describe_env(plan.partition.env)} {describe_command(plan.partition)}"
    for note in plan.notes:
        yield "note", note


def _node_rows(node: NodePlan, *, sizes: bool = True) -> _Rows:
    share = f"ranks {_span(node.ranks)}  devices {_devices(node)}  parts {_span(node.parts)}"
    ports = f"master {node.master_port}" + (f", graph service {node.service_port}" if node.server else "")
    yield "share", f"{share}  address {node.address}  ports {ports}"
    yield "folders", f"run {node.run_dir}  parts {node.data_dir}  code {node.code_dir}"
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
            yield "files", f"{name}: {_files(files, list_them=named) if sizes else _names(files, list_them=named)}"
    yield "logs", f"{node.run_dir}/logs: " + " ".join(log.rpartition("/")[2] for log in node.log_files)


def _beyond(env: Mapping[str, str], common: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if common.get(name) != value}


def _files(files: Sequence[PlannedFile], *, list_them: bool) -> str:
    total = decimal(sum(file.bytes for file in files))
    if not list_them:
        return f"{count(len(files), 'file')}, {total}"
    return ", ".join(f"{file.dest.rpartition('/')[2]} ({_size(file)})" for file in files) + f", {total}"


def _names(files: Sequence[PlannedFile], *, list_them: bool) -> str:
    return ", ".join(file.dest.rpartition("/")[2] for file in files) if list_them else count(len(files), "file")


def _size(file: PlannedFile) -> str:
    return decimal(file.bytes) if file.sha256 else "made at launch"


def _word(word: str) -> str:
    return str(word) if isinstance(word, Secret) else quote(word)


def _devices(node: NodePlan) -> str:
    return ",".join(map(str, node.devices)) or "CPU"


def _span(numbers: Sequence[int]) -> str:
    """Consecutive numbers, as ranks and parts of a node always are."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _row(row: tuple[str, str]) -> Text:
    return Text.assemble((f"  {row[0]:<11} ", "dim"), row[1])
