"""Builds the command lines and the environments of a node's graph server and ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property

from launcher.command import Command, Secret
from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import ServingCluster, clients, gateways, host_key
from launcher.node.environment import World
from launcher.plan.model import NO_SITE, NodeFacts, NodePlan, OwnCommand, PlannedFile, Topology
from launcher.plan.placement import endpoint, node_interface, with_user_env
from trainer.core.train_config import TrainConfig


@dataclass(frozen=True)
class PlanContext:
    config: ResolvedConfig
    facts: Mapping[int, NodeFacts]
    run_id: str
    token: Secret
    operator: str  #: user and machine that launch, as ``alice@laptop``; '' if unknown
    nodes: tuple[NodePlan, ...]  #: without files, and without commands except ``start``
    lead: int  #: node_rank of the first node that trains
    own: OwnCommand | None  #: the user's own command; None: the bundled trainer
    model: OwnCommand | None  #: the file of the user's own model class as a command, with the modules it imports
    resume: PlannedFile | None  #: checkpoint to resume from
    tracked: tuple[PlannedFile, ...] = ()  #: files of the trackers of the run that is resumed
    start: PlannedFile | None = None  #: checkpoint whose weights the run starts from
    serving: ServingCluster | None = None  #: the serving cluster to which the run attaches
    version: int = 1  #: version of cluster.json
    topology: Topology = Topology()
    queued_at: float = 0.0  #: of ``NodeSpec``
    wait_limit: float = 0.0

    @property
    def num_parts(self) -> int:
        return self.serving.num_parts if self.serving else self.config.num_parts

    @property
    def remote(self) -> bool:
        """Whether the run uses graph servers; a single worker reads all parts from its own disk instead."""
        return len(self.nodes) > 1 or self.nodes[0].role != "worker"

    @property
    def encrypted(self) -> bool:
        if self.serving:
            return self.serving.encrypted
        choice = self.config.run.encrypt
        return self.remote and (choice == "on" or (choice == "auto" and not self.config.local))

    @property
    def fixed_master_addr(self) -> str:
        """Address of rank 0 as the config gives it; '' for that of its node."""
        return "" if self.config.run.master_addr == "auto" else self.config.run.master_addr

    @cached_property
    def world(self) -> World:
        return World(self.run_id, self.nodes, self.fixed_master_addr)

    @cached_property
    def train(self) -> TrainConfig:
        """Settings of the bundled trainer, with the path of the model's file on the nodes, below the run folder."""
        train = self.config.train
        if self.model is None:
            return train
        return replace(train, model=f"files/{self.model.argv[1]}:{train.model.rpartition(':')[2]}")

    @cached_property
    def gateways(self) -> frozenset[int]:
        """node_ranks of the nodes whose graph servers sample batches for clients."""
        config = self.config
        servers = (k for k, node in enumerate(config.nodes) if node.role == "server")
        return frozenset((*servers, *(gateways(config) if clients(config) else ())))

    @cached_property
    def processes(self) -> Mapping[str, int]:
        """Number of ranks on each host, by ``host_key``."""
        counts: Counter[str] = Counter()
        for node in self.config.nodes:
            counts[host_key(self.config, node)] += node.nproc
        return counts


def with_commands(context: PlanContext, node: NodePlan) -> NodePlan:
    """Return the plan of a node with the commands of its graph server and of its ranks.

    The command of the ranks is the rank runner, a program that the supervisor starts once per rank. It starts the
    bundled trainer at once, but a user's own command only when the graph server is ready.
    """
    run, own, python = context.config.run, context.own, node.start.argv[0]
    server = trainer = None
    if node.service_port:
        gateway = node.node_rank in context.gateways  # it also samples whole batches for clients
        argv = [python, "-m", "trainer", "serve", "--parts", node.data_dir, "--own", ",".join(map(str, node.parts))]
        argv += ["--bind", endpoint(node.bind, node.service_port), "--cluster", f"{node.run_dir}/cluster.json"]
        argv += ["--key-file", f"{node.run_dir}/service.key"] if context.encrypted else []
        argv += ["--ready-file", f"{node.run_dir}/server.ready", "--node-rank", str(node.node_rank)]
        argv += ["--stats-file", f"{node.run_dir}/server_stats.json", "--server-wait", f"{run.server_wait:g}"]
        argv += ["--buffer-mb", str(run.server_buffer)] if gateway else []
        argv += ["--batch-threads", str(run.server_threads)] if gateway and run.server_threads != "auto" else []
        env = _run_env(context, node) | _reach_env(context, node)
        env |= {"GNNFLEET_PROCESS": "server", "CUDA_VISIBLE_DEVICES": ""}
        server = Command(tuple(argv), _with_user_env(context, node, env), node.run_dir)
    if node.ranks:
        argv = [python, NO_SITE, f"{node.code_dir}/launcher/node/supervisor/rank_runner.py", "--run-dir", node.run_dir]
        argv += ["--await-server"] if own and node.service_port else []
        argv += ["--"]
        if own:
            argv += own_argv(own, node)
        else:
            argv += [python, "-m", "trainer", "train", *(["--parts", node.data_dir] if node.parts else [])]
            argv += train_flags(context.train)
            if (start := context.config.train.start) and context.start:
                moved = {"checkpoint": f"{node.run_dir}/{context.start.dest}", "modules": start.modules}
                argv += ["--start", json.dumps(moved)]
            argv += ["--resume", f"{node.run_dir}/{context.resume.dest}"] if context.resume else []
        cwd = f"{node.run_dir}/files" if own else node.run_dir
        trainer = Command(tuple(argv), _with_user_env(context, node, _rank_env(context, node)), cwd)
    return replace(node, server=server, trainer=trainer)


def own_argv(own: OwnCommand, node: NodePlan) -> list[str]:
    """Return the user's command for a node; a first word ``python`` or ``python3`` becomes the node's interpreter."""
    first = node.start.argv[0] if own.argv[0] in ("python", "python3") else own.argv[0]
    return [first, *own.argv[1:]]


def tracker_command(context: PlanContext, node: NodePlan) -> Command | None:
    """Build the command that sends the run to its trackers; None without any. The node with rank 0 runs it."""
    if not context.config.train.track or not node.ranks:  # nodes that do not run it report their load to the lead node
        return None
    argv = [node.start.argv[0], "-m", "trainer", "track", node.run_dir]
    env = _with_user_env(context, node, {"PYTHONPATH": node.code_dir, "CUDA_VISIBLE_DEVICES": ""})
    return Command(tuple(argv), env, node.run_dir)


_LEFT_OUT_AT_DEFAULT = (  # keeps the shown command short
    "precision", "device_cache", "sampling", "checkpoint_seconds", "label_smoothing", "keep", "activation",
    "input_dropout", "attention_dropout", "num_hard_negatives", "decoder",
)  # fmt: skip


def train_flags(train: TrainConfig) -> list[str]:
    """Return the settings in ``train`` as command-line options of the trainer.

    A setting that is true becomes an option without a value, and one with keys of its own a JSON object. No option is
    made for

    - a setting that is None, false or an empty list
    - ``resume`` and ``start``, as their paths differ between nodes, and ``track``, as supervisors start trackers
    - a setting in ``_LEFT_OUT_AT_DEFAULT`` that has its default value
    """
    flags: list[str] = []
    for field in fields(train):
        value = getattr(train, field.name)
        if field.name in ("resume", "start", "track") or value is None or value is False or value == ():
            continue
        if field.name in _LEFT_OUT_AT_DEFAULT and value == field.default:
            continue
        flags.append("--" + field.name.replace("_", "-"))
        if isinstance(value, Mapping):
            flags.append(json.dumps(dict(value)))
        elif is_dataclass(value):
            flags.append(json.dumps({key: item for key, item in vars(value).items() if item is not None}))
        elif value is not True:
            flags.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return flags


def _run_env(context: PlanContext, node: NodePlan) -> dict[str, str]:
    env = {
        # has a ``sitecustomize`` that makes a process write its stack traces on a signal
        "PYTHONPATH": f"{node.code_dir}/launcher/node/site:{node.code_dir}",
        "PYTHONUNBUFFERED": "1",
        "NODE_RANK": str(node.node_rank),
        "GNNFLEET_RUN_ID": context.run_id,
        "GNNFLEET_RUN_DIR": node.run_dir,
        "GNNFLEET_TOKEN": context.token,
        **({"GNNFLEET_PARTS": node.data_dir} if node.parts else {}),
        "GNNFLEET_PART_IDS": ",".join(map(str, node.parts)),
        "GNNFLEET_CLUSTER": f"{node.run_dir}/cluster.json",
    }
    if not context.config.data.digests:
        env["GNNFLEET_DIGESTS"] = "0"
    if context.config.in_job_steps:  # all processes of a job get SIGTERM at once
        env["GNNFLEET_SAVE_ON_TERM"] = f"{0.6 * context.config.run.grace:g}"
    if context.encrypted:
        env["GNNFLEET_SERVICE_KEY"] = f"{node.run_dir}/service.key"
    return env


def _rank_env(context: PlanContext, node: NodePlan) -> dict[str, str]:
    run, config, fact = context.config.run, context.config.nodes[node.node_rank], context.facts.get(node.node_rank)
    env = _run_env(context, node) | context.world.environment(node.node_rank)
    if context.remote:
        env |= {"GNNFLEET_SERVER_WAIT": f"{run.server_wait:g}"} | _reach_env(context, node)
    if context.own and context.resume:
        env["GNNFLEET_RESUME"] = f"{node.run_dir}/{context.resume.dest}"
    if run.restarts:
        env["GNNFLEET_RESTARTS"] = str(run.restarts)  # every node keeps checkpoints
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # suppresses each rank's warning about addresses without a host name
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.devices))
    if node.devices:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi; CUDA's default is the fastest device first
    if interface := node_interface(context.config, config, fact):
        env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if config.batch_share != 1 and not context.own:
        env["GNNFLEET_BATCH_SHARE"] = f"{config.batch_share:g}"
    if fact is not None:
        env["OMP_NUM_THREADS"] = str(max(1, fact.cpus // context.processes[host_key(context.config, config)]))
    return env


def _reach_env(context: PlanContext, node: NodePlan) -> dict[str, str]:
    # ``trainer.core.remote_settings.RemoteAccess`` reads these variables.
    env: dict[str, str] = {"GNNFLEET_WIRE_ROWS": context.config.run.wire_rows}
    if node.parts:
        env["GNNFLEET_CACHE"] = context.config.data.cache
    if node.parts and context.topology.choice:
        env["GNNFLEET_TOPOLOGY"] = context.topology.choice
    return env


def _with_user_env(context: PlanContext, node: NodePlan, ours: dict[str, str]) -> dict[str, str]:
    return with_user_env(context.config.nodes[node.node_rank], context.facts.get(node.node_rank), ours)
