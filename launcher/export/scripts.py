"""Writes a run as a shell script that a person could have written: for bash, torchrun or Slurm.

The script runs on each node. It starts the node's graph server and ranks, without a supervisor. Its text is in
``node.sh.j2``. Values that differ between nodes are in Bash arrays, indexed by the node's number.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from launcher.command import Secret, quote
from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import lead
from launcher.errors import UsageError
from launcher.export.placed_plan import (
    ExportRequest,
    Place,
    check_exportable,
    cpus_of,
    memory_of,
    parts_name,
    placed_plan,
    without_credentials,
)
from launcher.node.environment import RANK_VARIABLES
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.partition import partitioning
from launcher.plan.placement import interpreter
from launcher.plan.sbatch import is_on, normalized, option_lines, warning_seconds
from launcher.plan.service_key import new_key_pair
from launcher.plan.wrap import wrapped
from launcher.text import count

_WIDTH = 100  # characters of a line with a command

_PORTS = range(20000, 32000)  # below the ephemeral ports of Linux

#: Placeholders in the plan. No value of a config contains NUL.
_PYTHON, _PARTS, _RUNS, _HERE, _RUN = "\0PYTHON\0", "\0PARTS\0", "\0RUNS\0", "\0HERE\0", "\0RUN\0"

#: Placeholders, and what the script has in their place.
_SHELL = {_PYTHON: "${PYTHON[@]}", _PARTS: "$PARTS", _HERE: "$HERE", _RUN: "$RUN"}

#: Variables that the script sets for processes, which a container has to be given (``wrap``), beside ``_exports``.
_SET = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME GNNFLEET_RUN_DIR GNNFLEET_PARTS "
    "GNNFLEET_PART_IDS GNNFLEET_CLUSTER GNNFLEET_SERVICE_KEY GNNFLEET_SERVER_READY GNNFLEET_RESUME"
).split()

#: Options of the graph server that differ between nodes, and what the script has as their values.
_SERVER_OPTIONS = {
    "--own": '"${OWN[NODE]}"',
    "--bind": '"tcp://0.0.0.0:$((SERVICE_PORT + NODE))"',
    "--cluster": '"$GNNFLEET_CLUSTER"',
    "--key-file": '"$KEY"',
    "--ready-file": '"$GNNFLEET_SERVER_READY"',
    "--node-rank": '"$NODE"',
    "--stats-file": '"$RUN/server_stats.json"',
}

#: Variables of the plan that the script does not export as they are, beside ``RANK_VARIABLES``: those of the
#: supervisor, and those that the script sets for each node.
_NOT_EXPORTED = re.compile(
    r"GNNFLEET_(TOKEN|RUN_ID|RUN_DIR|PARTS|PART_IDS|CLUSTER|SERVICE_KEY|PROCESS|RESTARTS)"
    r"|PYTHONPATH|PYTHONUNBUFFERED|CUDA_.*|OMP_NUM_THREADS"
)


@dataclass(frozen=True)
class _Script:
    text: str
    key: str  #: content of the key file beside the script; '' without encryption
    notes: tuple[str, ...]


class _Code(str):
    """Shell code. In a command or in the template, any other text is quoted."""


def key_path(output: Path) -> Path:
    """Return the path of the file with secrets that belongs to an exported file."""
    return output.with_suffix(".secret.yml" if output.suffix in (".yml", ".yaml") else ".key")


def export_script(kind: str, request: ExportRequest, sbatch: Mapping[str, str], output: Path | None) -> _Script:
    """Return a script that runs the graph servers and the trainer.

    kind: bash, torchrun or slurm. sbatch: options of sbatch by name. output: file that the script will be written to.
    Raises UsageError if a script of this kind cannot run the config.
    """
    config, left_out = without_credentials(request.config)
    slurm, local = kind == "slurm", config.local
    if local and config.run.encrypt == "auto":  # all on one machine
        config = replace(config, run=replace(config.run, encrypt="off"))
    check_exportable(config, kind)
    if slurm:
        sbatch = {**normalized(config.slurm), **sbatch, **normalized(sbatch)}
        # With ``transport: slurm``, nodes get their GPUs from the job, unless one has ``devices`` or ``procs``.
        number = sbatch.get("gpus-per-node", "").rpartition(":")[2]  # may be as a100:2
        if config.in_job_steps and number.isdecimal() and not any(n.devices or n.procs for n in config.nodes):
            devices = tuple(range(int(number)))
            config = replace(config, nodes=tuple(replace(node, devices=devices) for node in config.nodes))
        shapes = {(node.role, node.nproc, len(node.devices)) for node in config.nodes}
        if len(shapes) > 1 or "worker" not in {role for role, _, _ in shapes}:
            raise UsageError(
                "--to slurm: the nodes of a job get equal numbers of tasks, so all nodes must be workers with equal "
                "procs and devices"
            )
    request = replace(request, config=config)
    given = {lead(config): config.run.master_addr} if config.run.master_addr != "auto" else {}
    hosts = [
        f"\0HOST{k}\0" if slurm else node.address or given.get(k) or ("127.0.0.1" if local else node.host)
        for k, node in enumerate(config.nodes)
    ]
    plan = placed_plan(request, [Place(host, "0.0.0.0", _RUNS, _PYTHON, _PARTS) for host in hosts], Secret())
    if plan.encrypted and output is None:
        raise UsageError(
            "the script needs a key file for the encrypted graph service: give -o FILE, so that the key is written "
            "beside it, or --set run.encrypt=off"
        )
    values = {**_run_values(request, plan, output, slurm), **_node_values(config, plan, hosts, kind)}
    job, of_job = _job_values(request, plan, sbatch) if slurm else ({"sbatch": []}, [])
    template = _environment().get_template("node.sh.j2")
    key = json.dumps(new_key_pair()) if plan.encrypted else ""

    notes = ["every node needs the key file, too; keep it private"] if plan.encrypted else []
    pythons = [(interpreter(config, k), node.wrap) for k, node in enumerate(config.nodes)]
    different = [k for k, python in enumerate(pythons) if python != pythons[0]]
    if different:
        notes.append(f"node{different[0]} uses another Python or setup than node0: change the script on that node")
    if any(str(device).startswith("MIG") for node in config.nodes for device in node.devices):
        notes.append("a process sees one MIG instance only: set CUDA_VISIBLE_DEVICES for each rank in the script")
    if plan.own_command and config.train.track:
        notes.append("train.track is left out: for your own command, trackers need gnnfleet's supervisors")
    if plan.own_command:
        notes.append("your script and run.files are not copied: the script runs in the folder of the exported file")
    if plan.train is not None and ":" in plan.train.model:
        notes.append("the file of the model class and run.files are not copied: every node needs them beside this file")
    notes += of_job
    if left_out:
        notes.append(f"credentials are left out ({', '.join(left_out)}); set them in the environment of the script")
    if (store := config.data.store) is not None:
        notes.append(
            f"each node fetches its parts from {store}; upload them before: gnnfleet partition push --config FILE"
        )
    if config.data.store_limit is not None:
        notes.append("data.store_limit has no effect on a script: delete parts that are not needed yourself")
    return _Script(template.render(values, **job, kind=kind), key, tuple(notes))


def _environment() -> Environment:
    """Return the environment of the template: every value that is not ``_Code`` becomes one quoted word."""
    made = Environment(
        loader=PackageLoader("launcher.export", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, _Code) else quote(str(value)),
    )
    made.filters |= {
        "code": _Code,
        "comment": lambda text: _Code(text.replace("\n", "\n#   ")),
        "array": lambda words: _Code(f"({' '.join(quote(str(word)) for word in words)})"),
    }
    return made


def _job_values(request: ExportRequest, plan: LaunchPlan, given: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the template that describe the job, and notes.

    They are its options, and what it does before its time limit. Raises UsageError if an option in ``given``
    contradicts cluster.yml.
    """
    config = request.config
    node = config.nodes[0]
    options = {"job-name": config.name, "nodes": str(len(config.nodes)), "ntasks-per-node": "1"}
    options |= {"gpus-per-node": str(len(node.devices))} if node.devices else {}
    for name in ("nodes", "ntasks-per-node", "gpus-per-node"):
        if given.get(name, options.get(name, "")).rpartition(":")[2] != options.get(name, ""):
            raise UsageError(
                f"--slurm {name}={given[name]}: the script needs {options.get(name, 'none')}, as cluster.yml gives "
                "`nodes`, `procs` and `devices`; one task per node starts all its processes"
            )
    notes: list[str] = []
    if not {"exclusive", "cpus-per-task", "cpus-per-gpu"} & given.keys():
        if node.devices or node.cpus:
            options["cpus-per-task"] = str(cpus_of(node, config))
        else:
            options["exclusive"] = "true"  # trains on all processors of its nodes
    if not {"mem", "mem-per-cpu", "mem-per-gpu"} & given.keys():
        memory = max(memory_of(k, config, request.parts, plan) for k in range(len(config.nodes)))
        if memory:
            options["mem"] = f"{memory}M"
        elif is_on({**options, **given}, "exclusive"):
            options["mem"] = "0"  # all of the node's
        else:
            notes.append(
                "the memory of a node is Slurm's default, as the parts are not on this machine: give `memory` of the "
                "nodes in cluster.yml, or --slurm mem=64G"
            )
    warning = f"B:USR1@{warning_seconds(given)}"
    options |= {"output": "%x-%j.log", "open-mode": "append", "signal": warning, **given}
    seconds = options["signal"].rpartition("@")[2]
    return {
        "sbatch": [_Code(line) for line in option_lines(options)],
        "requeue": is_on(given, "requeue"),
        "patience": (int(seconds) if seconds.isdecimal() else 60) // 2,  # 60 is Slurm's default
        "port_ranges": max(1, len(_PORTS) // (len(plan.nodes) + 1)),
    }, notes


def _run_values(request: ExportRequest, plan: LaunchPlan, output: Path | None, slurm: bool) -> dict[str, Any]:
    """Return the values of the template that describe the run as a whole."""
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
    cluster = plan.nodes[0].file("cluster.json").content
    width = len(plan.nodes) + 1
    place = int(hashlib.sha256(plan.run_id.encode()).hexdigest()[:8], 16) % max(1, len(_PORTS) // width)
    auto = config.run.master_port == "auto", config.run.service_port == "auto"
    # cluster.json for a here-document in which Bash replaces variables: the ports, and hosts of a job
    head = json.loads(cluster)
    nodes = head.pop("nodes")
    for k, node in enumerate(nodes):
        if node.get("endpoint"):
            node["endpoint"] = node["endpoint"].removesuffix(str(plan.nodes[k].service_port)) + f"\0PORT{k}\0"
    lines = ",\n".join(f"  {json.dumps(node, ensure_ascii=False)}" for node in nodes)
    made = re.sub(r"([\\$`])", r"\\\1", f'{json.dumps(head)[:-1]}, "nodes": [\n{lines}\n]}}'.replace("\\u0000", "\0"))
    made = re.sub("\0PORT([0-9]+)\0", r"$((SERVICE_PORT + \1))", made)
    fetch: list[str] = []  # the command that fetches a node's parts
    if config.data.store is not None:
        own = [_Code(word) for word in ('"$PARTS"', "--part", "${OWN[NODE]//,/ --part }")]
        fetch = [_PYTHON, "-m", "launcher", "partition", "fetch", config.data.store, *own]
        fetch += ["--replicated"] if plan.topology.replicated else []
        for name, value in config.data.store_options.items():
            plain = False  # whether it is a text that YAML reads as it is, and not as a number, a list …
            with suppress(yaml.YAMLError, ValueError):
                plain = isinstance(value, str) and yaml.safe_load(value) == value
            fetch += ["--store-option", f"{name}={value if plain else json.dumps(value)}"]
    wrap: tuple[str, ...] = ()  # the words before a command in the container of node 0
    if config.nodes[0].wrap:
        source = os.path.expanduser(config.data.source or "")
        folders = [_HERE, _PARTS, "" if slurm else _RUN, source if source.startswith("/") else ""]
        names = {name for one in plan.nodes for name in _exported(one, config.nodes[0].env)}
        # A container may start in another folder.
        there = _HERE if request.own_command or slurm else _RUN
        within = wrapped(config.nodes[0].wrap, folders, {*_SET, *names})
        wrap = (*within, "sh", "-c", 'cd "$0" && exec "$@"', there)
    return {
        "what": f"{words}: {count(plan.world_size, 'process', 'es')} on {count(len(plan.nodes), 'node')}",
        "needs": ", ".join(needs),
        "run_id": plan.run_id,
        "setup": map(_Code, shell.setup),
        "python": shell.argv[0],
        "wrap": _Code(" ".join(map(_quoted, wrap))) if wrap else "",
        "parts": parts,
        "key": key_path(output).name if plan.encrypted and output else "",
        "here": str((output.absolute() if output else Path.cwd() / "script").parent),
        "own_command": bool(request.own_command),
        "partition": _lines([_PYTHON, *(_PARTS if word == folder else word for word in partition[1:])])
        if partition
        else "",
        "fetch": _lines(fetch) if fetch else "",
        "remedy": "make the parts there, or copy them" if partition else "copy the parts there, or change PARTS",
        "cluster": _Code(re.sub("\0HOST([0-9]+)\0", r"${HOSTS[\1]}", made)),
        "world_size": plan.world_size,
        "first_port": _PORTS[place * width],
        "master_port": "" if auto[0] else plan.master_port,
        "service_port": "" if auto[1] else config.run.service_port,
        "lead": plan.lead,
    }


def _node_values(config: ResolvedConfig, plan: LaunchPlan, hosts: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the values of the template that describe the nodes and their processes."""
    distinct = list(dict.fromkeys(hosts))
    numbers = ", ".join(f"{k} on {host}" for k, host in enumerate(hosts[:4]))
    # One command starts the graph server of any node. It has the options of a gateway, which do no harm on others.
    server = max((list(node.server.argv) for node in plan.nodes if node.server), key=len, default=[])
    for option, value in _SERVER_OPTIONS.items():
        if option in server:
            server[server.index(option) + 1] = _Code(value)

    # The command of a rank or, for torchrun, the end of torchrun's command line: the program with arguments.
    argv = next(list(node.trainer.argv) for node in plan.nodes if node.trainer)
    rank = argv[argv.index("--") + 1 :]
    if not plan.own_command and "--parts" in rank:  # given as GNNFLEET_PARTS, which clients do not have
        del rank[rank.index("--parts") : rank.index("--parts") + 2]
    if plan.train is not None and ":" in plan.train.model:  # the file of a class, which a launch would send
        place = rank.index("--model") + 1
        rank[place] = f"{_HERE}/{rank[place].removeprefix('files/')}"
    if plan.train is not None and plan.train.track:
        rank += ["--track", json.dumps(plan.train.track)]  # without a supervisor, rank 0 starts the trackers
    if kind == "torchrun":
        rank = rank[1:] if rank[0] == _PYTHON else ["--no-python", *rank]
    elif config.nodes[0].wrap and rank[0] != _PYTHON:
        rank = [_Code('"${WRAP[@]}"'), *rank]
    return {
        "nodes": plan.nodes,
        "numbers": numbers + (", …" if len(hosts) > 4 else ""),
        "hosts": hosts,
        "own_parts": [",".join(map(str, node.parts)) for node in plan.nodes],
        "procs": [len(node.ranks) for node in plan.nodes],
        "first_ranks": [node.ranks[0] if node.ranks else 0 for node in plan.nodes],
        "groups": [int(node.trainer.env["GROUP_RANK"]) if node.trainer else 0 for node in plan.nodes],
        "devices": [",".join(map(str, node.devices)) for node in config.nodes],
        "has_clients": any(not node.parts for node in plan.nodes),
        "has_servers": any(not node.ranks for node in plan.nodes),
        "find_interface": len(distinct) > 1 and not any(node.interface for node in config.nodes),
        "other": hosts.index(distinct[-1]) if len(distinct) > 1 else 0,
        "exports": _exports(config, plan),
        "server": _lines(server),
        "trainer": _lines(rank),
    }


def _exports(config: ResolvedConfig, plan: LaunchPlan) -> Iterable[_Code]:
    """Return lines that export the settings of the graph service and ``env`` of the nodes."""
    by_node = [_exported(node, config.nodes[node.node_rank].env) for node in plan.nodes]
    common = {name: text for name, text in by_node[0].items() if all(env.get(name) == text for env in by_node)}
    lines = [f"export {name}={_quoted(text)}" for name, text in sorted(common.items())]
    for k, env in enumerate(by_node):
        own = [f"export {name}={_quoted(text)}" for name, text in sorted(env.items()) if name not in common]
        lines += [f"if [[ $NODE == {k} ]]; then {'; '.join(own)}; fi"] if own else []
    return map(_Code, lines)


def _exported(node: NodePlan, user: Mapping[str, str]) -> dict[str, str]:
    command = node.trainer or node.server
    env = command.env if command else {}
    env = {name: text for name, text in env.items() if name not in RANK_VARIABLES}
    found = {name: text for name, text in env.items() if name in user or not _NOT_EXPORTED.fullmatch(name)}
    return {**found, **({"PYTHONPATH": user["PYTHONPATH"]} if "PYTHONPATH" in user else {})}


def _lines(argv: Sequence[str]) -> _Code:
    """Return a command as lines of about 100 characters; an option and its value share a line."""
    lines: list[str] = []
    line = ""
    for before, word in zip(("", *argv), argv, strict=False):
        text = _quoted(word)
        breaks = word.startswith("-") or not before.startswith("-")
        if line and breaks and len(line) + len(text) > _WIDTH:
            lines.append(line + " \\")
            line = "    " + text
        else:
            line = f"{line} {text}" if line else text
    return _Code("\n".join([*lines, line]))


def _quoted(word: str) -> str:
    """Quote a word for the script, and replace the plan's placeholders by variables of the script."""
    if isinstance(word, _Code):
        return word
    if not any(mark in word for mark in _SHELL):
        return shlex.quote(word)
    text = re.sub(r'(["\\$`])', r"\\\1", word)
    for mark, shell in _SHELL.items():
        text = text.replace(mark, shell)
    return f'"{text}"'
