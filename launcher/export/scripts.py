"""Writes a run as a shell script that a person could have written: for bash, torchrun or Slurm's srun.

The script starts a graph server on each node that holds parts, and the trainer, without a supervisor. The texts are in
``node.sh.j2`` and ``slurm.sh.j2``. Values that differ between nodes are in Bash arrays, indexed by the node's number.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from launcher.command import Command, Secret
from launcher.config.resolve import ResolvedConfig
from launcher.errors import UsageError
from launcher.export.placed_plan import (
    ExportRequest,
    Place,
    check_exportable,
    parts_name,
    placed_plan,
    without_credentials,
)
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.partition import partitioning
from launcher.plan.placement import interpreter
from launcher.plan.sbatch import is_on, normalized, option_lines, warning_seconds
from launcher.plan.service_key import new_key_pair
from launcher.text import count

_WIDTH = 100  # characters of a line with a command

#: Placeholders in the plan, and what the script has in their place.
_SHELL = {"@PYTHON@": "$PYTHON", "@PARTS@": "$PARTS"}

#: Options of the graph server that differ between nodes, and what the script has as their values.
_SERVER_OPTIONS = {
    "--own": '"${OWN[NODE]}"',
    "--cluster": '"$GNNFLEET_CLUSTER"',
    "--key-file": '"$KEY"',
    "--ready-file": '"$GNNFLEET_SERVER_READY"',
    "--node-rank": '"$NODE"',
    "--stats-file": '"$RUN/server_stats.json"',
}

#: Variables of the plan that the script does not export as they are: those of the supervisor, of torchrun, and those
#: that the script sets for each node.
_NOT_EXPORTED = re.compile(
    r"GNNFLEET_(TOKEN|RUN_ID|RUN_DIR|PARTS|PART_IDS|CLUSTER|SERVICE_KEY|PROCESS|RESTARTS)|TORCHELASTIC_.*|ROLE_.*"
    r"|GROUP_.*|PYTHONPATH|PYTHONUNBUFFERED|CUDA_.*|OMP_NUM_THREADS|NODE_RANK|WORLD_SIZE|MASTER_.*"
)


@dataclass(frozen=True)
class Script:
    text: str
    key: str  #: content of the key file beside the script; '' without encryption
    notes: tuple[str, ...]


class _Word(str):
    """Shell code in a command, which ``_quoted`` does not quote."""


def key_path(output: Path) -> Path:
    """Return the path of the file with secrets that belongs to an exported file."""
    return output.with_suffix(".secret.yml" if output.suffix in (".yml", ".yaml") else ".key")


def export_script(kind: str, request: ExportRequest, sbatch: Mapping[str, str], output: Path | None) -> Script:
    """Return a script that runs the graph servers and the trainer.

    kind: bash, torchrun or slurm. sbatch: options of sbatch by name. output: file that the script will be written to.
    Raises UsageError if a script of this kind cannot run the config.
    """
    config, left_out = without_credentials(_without_needless_keys(request.config))
    slurm = kind == "slurm"
    check_exportable(config, kind)
    if slurm:
        sbatch = {**normalized(config.slurm), **sbatch}
        config = _with_devices_of_job(config, sbatch)
        _check_equal_nodes(config)
    request = replace(request, config=config)
    hosts = [f"${{NODES[{k}]}}" if slurm else _host(config, k) for k in range(len(config.nodes))]
    plan = placed_plan(request, [Place(host, "0.0.0.0", "@RUNS@", "@PYTHON@", "@PARTS@") for host in hosts], Secret())
    if plan.encrypted and output is None:
        raise UsageError(
            "the script needs a key file for the encrypted graph service: give -o FILE, so that the key is written "
            "beside it, or --set run.encrypt=off"
        )
    values = {**_run_values(request, plan, output), **_node_values(config, plan, hosts, kind)}
    if slurm:
        values |= _job_values(config, sbatch)
    template = _environment().get_template("slurm.sh.j2" if slurm else "node.sh.j2")
    key = json.dumps(new_key_pair()) if plan.encrypted else ""
    return Script(template.render(values, kind=kind), key, (*_notes(config, plan), *_store_notes(config, left_out)))


def _environment() -> Environment:
    loader = PackageLoader("launcher.export", "")
    made = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    made.filters["word"] = lambda text: text if text.isdigit() else f'"{text}"'
    return made


def _without_needless_keys(config: ResolvedConfig) -> ResolvedConfig:
    """Return the config without encryption if all nodes run on this machine and ``run.encrypt`` is ``auto``."""
    local = config.transport == "local" and config.run.encrypt == "auto"
    return replace(config, run=replace(config.run, encrypt="off")) if local else config


def _host(config: ResolvedConfig, k: int) -> str:
    return config.nodes[k].address or ("127.0.0.1" if config.transport == "local" else config.nodes[k].host)


def _check_equal_nodes(config: ResolvedConfig) -> None:
    shapes = {(node.role, node.nproc, len(node.devices)) for node in config.nodes}
    if len(shapes) > 1 or "worker" not in {role for role, _, _ in shapes}:
        raise UsageError(
            "--to slurm: the nodes of a job get equal numbers of tasks, so all nodes must be workers with equal procs "
            "and devices"
        )


def _with_devices_of_job(config: ResolvedConfig, options: Mapping[str, str]) -> ResolvedConfig:
    """Return the config with the GPUs that ``transport: slurm`` gets from its job, by ``gpus-per-node``.

    ``options``: options of sbatch. Nodes with ``devices`` or ``procs`` keep them.
    """
    number = options.get("gpus-per-node", "").rpartition(":")[2]  # may be as a100:2
    if config.transport != "slurm" or not number.isdecimal() or any(n.devices or n.procs for n in config.nodes):
        return config
    return replace(config, nodes=tuple(replace(node, devices=tuple(range(int(number)))) for node in config.nodes))


def _job_values(config: ResolvedConfig, sbatch: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the template that describe the job: its options, and what it does before its time limit."""
    options = _job_options(config, sbatch)
    seconds = options["signal"].rpartition("@")[2]
    warning = int(seconds) if seconds.isdecimal() else 60  # Slurm's default
    return {"sbatch": option_lines(options), "requeue": is_on(sbatch, "requeue"), "patience": warning // 2}


def _job_options(config: ResolvedConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Return all options of sbatch. Raises UsageError if an option in ``given`` contradicts cluster.yml."""
    node = config.nodes[0]
    options = {"job-name": config.name, "nodes": str(len(config.nodes)), "ntasks-per-node": str(node.nproc)}
    options |= {"gpus-per-node": str(len(node.devices))} if node.devices else {}
    for name in ("nodes", "ntasks-per-node", "gpus-per-node"):
        if given.get(name, options.get(name, "")).rpartition(":")[2] != options.get(name, ""):
            raise UsageError(
                f"--slurm {name}={given[name]}: cluster.yml gives {options.get(name, 'none')}; change `nodes`, `procs` "
                "or `devices` there"
            )
    warning = f"B:USR1@{warning_seconds(given)}"
    return {**options, "output": "%x-%j.log", "open-mode": "append", "signal": warning, **given}


def _run_values(request: ExportRequest, plan: LaunchPlan, output: Path | None) -> dict[str, Any]:
    """Return the values of the templates that describe the run as a whole."""
    config = request.config
    shell = interpreter(config, 0)
    folder = os.path.expanduser(config.data.folder)
    parts = os.path.abspath(folder) if config.makes_parts else config.data.folder
    if config.data.store is not None:
        parts = f"~/gnnfleet-work/data/{parts_name(config)}"
    partition = partitioning(config).command.argv if config.makes_parts and config.data.store is None else ()
    reads = "the parts in $PARTS" if config.data.store is None else f"access to {config.data.store}"
    needs = ["gnnfleet in $PYTHON", reads, *(["the key file $KEY"] if plan.encrypted else [])]
    words = " ".join(request.own_command) or "the bundled trainer"
    (cluster,) = {file.content for file in plan.nodes[0].files if file.dest.endswith("/cluster.json")}
    return {
        "what": f"{words}: {count(plan.world_size, 'process', 'es')} on {count(len(plan.nodes), 'node')}",
        "needs": ", ".join(needs),
        "run_id": plan.run_id,
        "setup": shell.setup,
        "python": re.sub(r"^~/", "$HOME/", _double_quoted(shell.argv[0])),
        "parts": re.sub(r"^~/", "$HOME/", _double_quoted(parts)),
        "key": key_path(output).name if plan.encrypted and output else "",
        "here": _double_quoted(str((output.absolute() if output else Path.cwd() / "script").parent)),
        "own_command": bool(request.own_command),
        "partition": _lines(["@PYTHON@", *("@PARTS@" if word == folder else word for word in partition[1:])])
        if partition
        else "",
        "fetch": _fetch(config, plan),
        "remedy": "make the parts there, or copy them" if partition else "copy the parts there, or change PARTS",
        "cluster": _cluster_text(cluster),
        "world_size": plan.world_size,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "lead": plan.lead,
    }


def _node_values(config: ResolvedConfig, plan: LaunchPlan, hosts: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the values of the templates that describe the nodes and their processes."""
    distinct = list(dict.fromkeys(hosts))
    numbers = ", ".join(f"{k} on {host}" for k, host in enumerate(hosts[:4]))
    return {
        "nodes": plan.nodes,
        "numbers": numbers + (", …" if len(hosts) > 4 else ""),
        "hosts": hosts,
        "own_parts": [",".join(map(str, node.parts)) for node in plan.nodes],
        "procs": [node.nproc for node in plan.nodes],
        "first_ranks": [node.ranks[0] if node.ranks else 0 for node in plan.nodes],
        "groups": [node.trainer_index or 0 for node in plan.nodes],
        "devices": [",".join(map(str, node.devices)) for node in config.nodes],
        "has_clients": any(not node.parts for node in plan.nodes),
        "has_servers": any(not node.ranks for node in plan.nodes),
        "find_interface": len(distinct) > 1 and not any(node.interface for node in config.nodes),
        "other": hosts.index(distinct[-1]) if len(distinct) > 1 else 0,
        "exports": _exports(config, plan),
        "server": _server(plan),
        "trainer": _trainer(plan, kind),
    }


def _cluster_text(text: str) -> str:
    head = json.loads(text)
    nodes = ",\n".join(f"  {json.dumps(node)}" for node in head.pop("nodes"))
    return f'{json.dumps(head)[:-1]}, "nodes": [\n{nodes}\n]}}'


def _exports(config: ResolvedConfig, plan: LaunchPlan) -> list[str]:
    """Return lines that export the settings of the graph service and ``env`` of the nodes."""
    by_node = [_exported(node, config.nodes[node.node_rank].env) for node in plan.nodes]
    common = {name: text for name, text in by_node[0].items() if all(env.get(name) == text for env in by_node)}
    lines = [f"export {name}={_quoted(text)}" for name, text in sorted(common.items())]
    for k, env in enumerate(by_node):
        own = [f"export {name}={_quoted(text)}" for name, text in sorted(env.items()) if name not in common]
        lines += [f"if [[ $NODE == {k} ]]; then {'; '.join(own)}; fi"] if own else []
    return lines


def _exported(node: NodePlan, user: Mapping[str, str]) -> dict[str, str]:
    command = node.trainer or node.server
    env = command.env if command else {}
    found = {name: text for name, text in env.items() if name in user or not _NOT_EXPORTED.fullmatch(name)}
    return {**found, **({"PYTHONPATH": user["PYTHONPATH"]} if "PYTHONPATH" in user else {})}


def _server(plan: LaunchPlan) -> str:
    """Return the one command that starts the graph server of any node; '' if the plan has no graph servers.

    The command has the options of a gateway, which do no harm on other nodes.
    """
    servers = [node for node in plan.nodes if node.server is not None]
    if not servers:
        return ""
    node = max(servers, key=lambda node: len(_argv(node.server)))
    first = node.service_port - node.node_rank
    argv = list(_argv(node.server))
    for option, value in {**_SERVER_OPTIONS, "--bind": f'"tcp://0.0.0.0:$(({first} + NODE))"'}.items():
        if option in argv:
            argv[argv.index(option) + 1] = _Word(value)
    return _lines(argv)


def _fetch(config: ResolvedConfig, plan: LaunchPlan) -> str:
    """Return the command that fetches a node's parts; '' without ``data.store``."""
    if config.data.store is None:
        return ""
    parts = [_Word(word) for word in ('"$PARTS"', "--part", "${OWN[NODE]//,/ --part }")]
    argv = ["@PYTHON@", "-m", "launcher", "partition", "fetch", config.data.store, *parts]
    argv += ["--replicated"] if plan.topology.replicated else []
    for name, value in config.data.store_options.items():
        plain = isinstance(value, str) and yaml.safe_load(value) == value
        argv += ["--store-option", f"{name}={value if plain else json.dumps(value)}"]
    return _lines(argv)


def _trainer(plan: LaunchPlan, kind: str) -> str:
    """Return the command of a rank or, for torchrun, the end of torchrun's command line: the program with arguments."""
    node = next(node for node in plan.nodes if node.ranks)
    argv = list(_argv(node.trainer))
    rank = argv[argv.index("--") + 1 :]
    if not plan.own_command and "--parts" in rank:  # given as GNNFLEET_PARTS, which clients do not have
        del rank[rank.index("--parts") : rank.index("--parts") + 2]
    if kind == "torchrun":
        rank = rank[1:] if rank[0] == "@PYTHON@" else ["--no-python", *rank]
    return _lines(rank)


def _argv(command: Command | None) -> tuple[str, ...]:
    assert command is not None
    return command.argv


def _lines(argv: Sequence[str]) -> str:
    """Return a command as lines of about 100 characters; an option and its value share a line."""
    lines, line = [], ""
    for before, word in zip(("", *argv), argv, strict=False):
        text = _quoted(word)
        breaks = word.startswith("-") or not before.startswith("-")
        if line and breaks and len(line) + len(text) > _WIDTH:
            lines.append(line + " \\")
            line = "    " + text
        else:
            line = f"{line} {text}" if line else text
    return "\n".join([*lines, line])


def _quoted(word: str) -> str:
    """Quote a word for the script, and replace the plan's placeholders by variables of the script."""
    if isinstance(word, _Word):
        return word
    if not any(mark in word for mark in _SHELL):
        return shlex.quote(word)
    text = _double_quoted(word)
    for mark, shell in _SHELL.items():
        text = text.replace(mark, shell)
    return f'"{text}"'


def _double_quoted(text: str) -> str:
    return re.sub(r'(["\\$`])', r"\\\1", text)


def _notes(config: ResolvedConfig, plan: LaunchPlan) -> tuple[str, ...]:
    notes = ["every node needs the key file, too; keep it private"] if plan.encrypted else []
    different = [k for k in range(1, len(config.nodes)) if interpreter(config, k) != interpreter(config, 0)]
    if different:
        notes.append(f"node{different[0]} uses another Python or setup than node0: change the script on that node")
    if any(str(device).startswith("MIG") for node in config.nodes for device in node.devices):
        notes.append("a process sees one MIG instance only: set CUDA_VISIBLE_DEVICES for each rank in the script")
    if plan.own_command:
        notes.append("your script and run.files are not copied: the script runs in the folder of the exported file")
    return tuple(notes)


def _store_notes(config: ResolvedConfig, left_out: Sequence[str]) -> list[str]:
    """Return notes about parts in ``data.store``. ``left_out``: variables with credentials that the nodes had."""
    notes, data = [], config.data
    if left_out:
        notes.append(
            f"credentials in `env` are left out ({', '.join(left_out)}); set them in the environment of the script"
        )
    if data.store is not None:
        notes.append(
            f"each node fetches its parts from {data.store}; upload them before: gnnfleet partition push --config FILE"
        )
    if data.store_limit is not None:
        notes.append("data.store_limit has no effect on a script: delete parts that are not needed yourself")
    return notes
