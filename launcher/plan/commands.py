"""Builds the command line and the environment of each process of a node: supervisor, graph server, ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import NamedTuple

from launcher.command import Command, Secret, quote
from launcher.config.consistency import RANK_VARIABLES
from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import ServingCluster, trainers
from launcher.config.schema import TrainConfig
from launcher.plan.model import NO_SITE, PlannedFile, Topology
from launcher.plan.own_script import OwnCommand
from launcher.plan.placement import Site, endpoint


@dataclass(frozen=True)
class PlanContext:
    config: ResolvedConfig
    run_id: str
    token: Secret
    operator: str  #: user and machine that launch, as ``alice@laptop``; '' if unknown
    sites: tuple[Site, ...]
    lead: int  #: node_rank of the first node that trains
    master_addr: str  #: '' if nothing trains
    master_port: int
    control_port: int | None  #: port of the hub on the lead node; None: the supervisors do not connect to each other
    own: OwnCommand | None  #: the user's own command; None: the bundled trainer
    resume: PlannedFile | None  #: checkpoint to resume from
    serving: ServingCluster | None = None  #: the serving cluster to which the run attaches
    version: int = 1  #: version of cluster.json
    topology: Topology = Topology()

    @property
    def num_parts(self) -> int:
        return self.serving.num_parts if self.serving else self.config.num_parts

    @property
    def remote(self) -> bool:
        """Whether the run uses graph servers; a single worker reads all parts from its own disk instead."""
        return len(self.sites) > 1 or self.sites[0].node.role != "worker"

    @property
    def encrypted(self) -> bool:
        if self.serving:
            return self.serving.encrypted
        choice = self.config.run.encrypt
        return self.remote and (choice == "on" or (choice == "auto" and self.config.transport != "local"))

    @cached_property
    def world_size(self) -> int:
        return self.config.world_size

    @cached_property
    def _trainers(self) -> dict[int, int]:
        return {k: index for index, k in enumerate(trainers(self.config))}

    @property
    def num_trainers(self) -> int:
        return len(self._trainers)

    def trainer_index(self, site: Site) -> int | None:
        """Return the index of node ``site`` among the nodes that train; None if it does not train."""
        return self._trainers.get(site.node_rank)


class NodeCommands(NamedTuple):
    """The commands of one node's processes; None for a process that the node does not run."""

    start: Command
    server: Command | None
    trainer: Command | None


def node_commands(context: PlanContext, site: Site) -> NodeCommands:
    server = server_command(context, site) if site.serves else None
    trainer = trainer_command(context, site) if site.ranks else None
    return NodeCommands(start_command(context, site), server, trainer)


def start_command(context: PlanContext, site: Site) -> Command:
    """Build the command that tmux runs on a node: the supervisor, which starts the processes in ``node.json``."""
    program = f"{site.code_dir}/launcher/node/supervisor/supervisor.py"
    argv = (site.python, NO_SITE, program, f"{site.run_dir}/node.json")
    folder = (f"mkdir -p {quote(_files(site))}",) if context.own and site.ranks else ()
    return Command(argv, _user_env(site, _base_env(site)), site.run_dir, (*site.setup, *folder))


def server_command(context: PlanContext, site: Site) -> Command:
    """Build the command of a node's graph server. A gateway also samples whole batches for clients."""
    run, own = context.config.run, ",".join(map(str, site.parts))
    argv = [site.python, "-m", "trainer", "serve", "--parts", site.data_dir, "--own", own]
    argv += ["--bind", endpoint(site.bind, site.service_port), "--cluster", f"{site.run_dir}/cluster.json"]
    argv += ["--key-file", f"{site.run_dir}/service.key"] if context.encrypted else []
    argv += ["--ready-file", f"{site.run_dir}/server.ready", "--node-rank", str(site.node_rank)]
    argv += ["--stats-file", f"{site.run_dir}/server_stats.json", "--server-wait", f"{run.server_wait:g}"]
    argv += ["--buffer-mb", str(run.server_buffer)] if site.gateway else []
    argv += ["--batch-threads", str(run.server_threads)] if site.gateway and run.server_threads != "auto" else []
    env = _run_env(context, site) | _reach_env(context, site) | _stacks_env(site)
    env |= {"GNNFLEET_PROCESS": "server", "CUDA_VISIBLE_DEVICES": ""}
    return Command(tuple(argv), _user_env(site, env), site.run_dir)


def trainer_command(context: PlanContext, site: Site) -> Command:
    """Build the command of the rank runner, a program that the supervisor starts once per rank.

    The rank runner starts the bundled trainer at once, but a user's own command only when the graph server is ready.
    """
    program = f"{site.code_dir}/launcher/node/supervisor/rank_runner.py"
    argv = [site.python, NO_SITE, program, "--run-dir", site.run_dir]
    argv += ["--await-server"] if context.own and site.serves else []
    argv += ["--", *(own_argv(context.own, site) if context.own else _train_argv(context, site))]
    cwd = _files(site) if context.own else site.run_dir
    return Command(tuple(argv), _user_env(site, _rank_env(context, site)), cwd)


def own_argv(own: OwnCommand, site: Site) -> list[str]:
    """Return the user's command for a node; a first word ``python`` or ``python3`` becomes the node's interpreter."""
    first = site.python if own.argv[0] in ("python", "python3") else own.argv[0]
    return [first, *own.argv[1:]]


def _train_argv(context: PlanContext, site: Site) -> list[str]:
    parts = ["--parts", site.data_dir] if site.parts else []
    argv = [site.python, "-m", "trainer", "train", *parts, *train_flags(context.config.train)]
    return [*argv, "--resume", f"{site.run_dir}/{context.resume.dest}"] if context.resume else argv


_LEFT_OUT_AT_DEFAULT = (  # keeps the shown command short
    "precision", "device_cache", "sampling", "checkpoint_seconds", "label_smoothing"
)  # fmt: skip


def train_flags(train: TrainConfig) -> list[str]:
    """Return the settings in ``train`` as command-line options of the trainer.

    A setting that is true becomes an option without a value, and one with keys of its own a JSON object. No option is
    made for

    - a setting that is None or false
    - ``resume``, as its path differs between nodes
    - a setting in ``_LEFT_OUT_AT_DEFAULT`` that has its default value
    """
    flags: list[str] = []
    for field in fields(train):
        value = getattr(train, field.name)
        if field.name == "resume" or value is None or value is False:
            continue
        if field.name in _LEFT_OUT_AT_DEFAULT and value == field.default:
            continue
        flags.append("--" + field.name.replace("_", "-"))
        if is_dataclass(value) or isinstance(value, Mapping):
            items = value if isinstance(value, Mapping) else vars(value)
            flags.append(json.dumps({key: item for key, item in items.items() if item is not None}))
        elif value is not True:
            flags.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return flags


def _base_env(site: Site) -> dict[str, str]:
    return {"PYTHONPATH": site.code_dir, "PYTHONUNBUFFERED": "1"}


def _run_env(context: PlanContext, site: Site) -> dict[str, str]:
    env = _base_env(site) | {
        "NODE_RANK": str(site.node_rank),
        "GNNFLEET_RUN_ID": context.run_id,
        "GNNFLEET_RUN_DIR": site.run_dir,
        "GNNFLEET_TOKEN": context.token,
        **({"GNNFLEET_PARTS": site.data_dir} if site.parts else {}),
        "GNNFLEET_PART_IDS": ",".join(map(str, site.parts)),
        "GNNFLEET_CLUSTER": f"{site.run_dir}/cluster.json",
    }
    if not context.config.data.digests:
        env["GNNFLEET_DIGESTS"] = "0"
    if context.config.transport == "slurm":  # Slurm sends SIGTERM to all processes of a job at once
        env["GNNFLEET_SAVE_ON_TERM"] = f"{0.6 * context.config.run.grace:g}"
    if context.encrypted:
        env["GNNFLEET_SERVICE_KEY"] = f"{site.run_dir}/service.key"
    return env


def _stacks_env(site: Site) -> dict[str, str]:
    """Return a PYTHONPATH with a ``sitecustomize`` that makes a process write its stack traces on a signal."""
    return {"PYTHONPATH": f"{site.code_dir}/launcher/node/site:{site.code_dir}"}


def _rank_env(context: PlanContext, site: Site) -> dict[str, str]:
    run, env = context.config.run, _run_env(context, site) | _world_env(context, site)
    if context.remote:
        env |= {"GNNFLEET_SERVER_WAIT": f"{run.server_wait:g}"} | _reach_env(context, site)
    if context.own and context.resume:
        env["GNNFLEET_RESUME"] = f"{site.run_dir}/{context.resume.dest}"
    if run.restarts:
        env["GNNFLEET_RESTARTS"] = str(run.restarts)  # every node keeps checkpoints
    env |= _stacks_env(site)
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # suppresses each rank's warning about addresses without a host name
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, site.node.devices))
    if site.node.devices:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi; CUDA's default is the fastest device first
    if site.interface:
        env |= {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    if site.node.batch_share != 1 and not context.own:
        env["GNNFLEET_BATCH_SHARE"] = f"{site.node.batch_share:g}"
    if site.threads is not None:
        env["OMP_NUM_THREADS"] = str(site.threads)
    return env


def _world_env(context: PlanContext, site: Site) -> dict[str, str]:
    # As torch.distributed.run sets them; the supervisor adds the variables that differ between ranks.
    world = str(context.world_size)
    return {
        "WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "GROUP_RANK": str(context.trainer_index(site)),
        "GROUP_WORLD_SIZE": str(context.num_trainers),
        "MASTER_ADDR": context.master_addr,
        "MASTER_PORT": str(context.master_port),
        "TORCHELASTIC_RUN_ID": context.run_id,  # libraries check this one to see whether the others are set
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 holds the store
    }


def _reach_env(context: PlanContext, site: Site) -> dict[str, str]:
    # ``trainer.core.remote_settings.RemoteAccess`` reads these variables.
    env: dict[str, str] = {"GNNFLEET_WIRE_ROWS": context.config.run.wire_rows}
    if site.parts:
        env["GNNFLEET_CACHE"] = context.config.data.cache
    if site.parts and context.topology.choice:
        env["GNNFLEET_TOPOLOGY"] = context.topology.choice
    return env


def _user_env(site: Site, ours: dict[str, str]) -> dict[str, str]:
    """Return the environment variables ``ours``, overridden by ``env`` in the node's config.

    A PYTHONPATH in ``env`` is appended to the one in ``ours``. ``env`` does not override variables that gnnfleet sets
    for each rank.
    """
    user = {name: value for name, value in site.node.env.items() if name not in RANK_VARIABLES}
    if "PYTHONPATH" in user:
        user["PYTHONPATH"] = f"{ours['PYTHONPATH']}:{user['PYTHONPATH']}"
    return ours | user


def _files(site: Site) -> str:
    return f"{site.run_dir}/files"
