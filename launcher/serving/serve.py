"""``gnnfleet serve``: creates a serving cluster from its config, or starts those of its servers that do not run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.command import Command, Secret
from launcher.config.loader import to_yaml
from launcher.config.resolve import ResolvedConfig, resolve_serving
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import FleetError, Interrupted, TransportError, UsageError, reason_of
from launcher.hostlist import fold
from launcher.manage.node_views import OpenRun, opened
from launcher.plan.build import final_plan, make_plan, new_token, offline_plan
from launcher.plan.model import LaunchPlan, NodeFacts, target_text
from launcher.plan.placement import node_login
from launcher.plan.serialize import read_run, run_json
from launcher.report.events import EventLog
from launcher.report.launch_file import Stage, user_at_host
from launcher.report.report import RunState
from launcher.report.run_folder import FoundRun, known_here, read_folder, register
from launcher.run.interrupts import Interrupts
from launcher.run.launch import LaunchContext, require_preflight, send_files
from launcher.run.options import LaunchOptions, check_run_id
from launcher.run.tmux_session import how_to_stop
from launcher.serving.cluster_state import (
    FILES,
    SECRETS,
    ClusterDescription,
    ServerState,
    newest_description,
    on_connections,
    read_description,
    read_files,
    server_rows,
    server_states,
)
from launcher.serving.start_stop import clear_node, start_lock, start_servers
from launcher.text import count
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_TIMEOUT = 30.0  # seconds to rename a folder


@dataclass(frozen=True)
class _ServingState:
    """A serving cluster before ``serve`` starts servers: connections to the nodes of the config, and their state."""

    config: ResolvedConfig
    connections: Mapping[int, Transport | TransportError]
    plan: LaunchPlan | None = None  #: present plan; None: no cluster of that name exists
    seen: Mapping[int, ServerState] = field(default_factory=dict)  #: present nodes by node_rank

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(k for k, one in self.seen.items() if one.view.alive)

    @property
    def unreachable(self) -> tuple[int, ...]:
        return tuple(k for k, one in self.seen.items() if one.view.unreachable)

    @property
    def to_start(self) -> tuple[int, ...]:
        """The node_ranks of nodes to start: those of a new cluster, else the reachable ones that do not run."""
        return tuple(k for k in range(len(self.config.nodes)) if k not in (*self.alive, *self.unreachable))


@dataclass(frozen=True)
class _Served:
    """Result of ``serve``: the cluster, the nodes that were started, and notes on what could not be done."""

    cluster: ClusterDescription
    started: tuple[int, ...]  #: node_ranks started by this call
    left: tuple[str, ...]  #: what could not be done
    folder: Path

    @property
    def exit_status(self) -> int:
        return 1 if self.left else 0

    def to_json(self) -> dict[str, Any]:
        values = {"started": list(self.started), "left": list(self.left), "folder": str(self.folder)}
        return {"kind": "serving", **self.cluster.to_json(), **values, "exit_status": self.exit_status}


def serve(config: ClusterConfig, options: LaunchOptions, name: str, console: Console) -> _Served:
    """Create serving cluster ``name``, or start its servers that do not run, and leave it running.

    Raises UsageError if the cluster runs with other nodes or parts than ``config`` has. Raises FleetError on failure;
    servers started by this call are then stopped, others keep running.
    """
    wanted = resolve_serving(config)
    check_run_id(name, "--name")
    with Interrupts(), _serving_state(wanted, name, console) as found:
        context = _ServeContext(wanted, options, name, console, running=bool(found.alive or found.unreachable))
        with closing(context.events), context.held:
            try:
                return _start_missing(context, found)
            except KeyboardInterrupt:
                why = "interrupted; the servers started by this command were stopped"
                context.give_up("stopped", why, Interrupted.exit_status)
                raise Interrupted(why) from None
            except FleetError as error:
                context.give_up("failed", str(error), error.exit_status)
                raise


# -- the cluster before this call ----------------------------------------------------------------


@contextmanager
def _serving_state(wanted: ResolvedConfig, name: str, console: Console) -> Iterator[_ServingState]:
    """Connect to the nodes of ``wanted``, and find the state of serving cluster ``name``.

    If the cluster differs from ``wanted`` and does not run, its files are moved away, and it counts as new. Raises
    UsageError if it differs and runs. Connections are closed on exit.
    """
    folder = known_here(name, [Path(wanted.run.runs_dir).expanduser()])
    known = read_folder(folder) if folder is not None else None
    if known is not None and known.plan is not None and not known.plan.serve_only:
        raise UsageError(f"--name {name}: {known.folder} is the folder of a training run; choose another --name")
    console.print(f"serving cluster {name}: connecting to {count(len(wanted.nodes), 'node')}", highlight=False)
    connections = connect_all(wanted)
    try:
        # The cluster may have been started from another machine.
        transports = {k: connection for k, connection in connections.items() if isinstance(connection, Transport)}

        def texts(k: int) -> dict[str, str]:
            folder = wanted.nodes[k].workdir.replace("{node_rank}", "*").rstrip("/")
            return read_files(transports[k], [f"{folder}/runs/{name}/node*/run.json"])

        found = {text for files in on_nodes(transports, texts).or_raise().values() for text in files.values()}
        plans = [plan for plan in map(read_run, found) if plan.serve_only]
        plan = max(plans, key=lambda plan: plan.version, default=None) or (known.plan if known else None)
        if plan is None:
            yield _ServingState(wanted, connections)
        elif different := differences(plan, wanted):
            configs = [known.config, wanted] if known and known.config else [wanted]
            listed = {target_text(node_login(wanted, node)): node for config in configs for node in config.nodes}
            nodes = []
            for node in plan.nodes:
                login = node.login
                alone = (
                    NodeConfig(login.host, login.port, login.user, role="server") if login else NodeConfig("localhost")
                )
                nodes.append(listed.get(node.target) or alone)
            _move_away(FoundRun(name, None, None, plan, replace(wanted, nodes=tuple(nodes)), None), different, console)
            yield _ServingState(wanted, connections)
        else:
            run = OpenRun(FoundRun(name, None, None, plan, wanted, None), connections)
            yield _ServingState(wanted, connections, plan, server_states(run, (*FILES, *SECRETS)))
    finally:
        close_all(connections)


def differences(plan: LaunchPlan, wanted: ResolvedConfig) -> list[str]:
    """Return what differs between the nodes, parts and encryption of a serving cluster and those of ``wanted``."""
    draft = offline_plan(wanted, plan.run_id)
    now, asked = [node.target for node in plan.nodes], [node.target for node in draft.nodes]
    found = []
    if now != asked:
        added, gone = Counter(asked) - Counter(now), Counter(now) - Counter(asked)
        words = [f"{fold(added.elements(), 6)} added"] if added else []
        words += [f"{fold(gone.elements(), 6)} removed"] if gone else []
        found.append(f"nodes: {', '.join(words) or 'other order'}")
    elif plan.num_parts != draft.num_parts:
        found.append(f"data.num_parts: {draft.num_parts} instead of {plan.num_parts}")
    elif [node.parts for node in plan.nodes] != [node.parts for node in draft.nodes]:
        copies = [round(sum(len(node.parts) for node in one.nodes) / one.num_parts) for one in (draft, plan)]
        found.append(f"data.replicas: {copies[0]} instead of {copies[1]}")
    elif (plan.partition and plan.partition.graph) != (draft.partition and draft.partition.graph):
        found.append("data: another dataset, or other options or partitioning")
    if plan.encrypted != draft.encrypted:
        found.append(
            "run.encrypt: " + ("off, and it is encrypted" if plan.encrypted else "on, and it is not encrypted")
        )
    return found


def _move_away(found: FoundRun, different: list[str], console: Console) -> None:
    """Rename the run folders of a cluster that does not run to ``<folder>-before``. Raises UsageError if it runs."""
    name, what = found.run_id, "; ".join(different)
    with opened(found) as run:
        views = run.views()
        if any(view.alive for view in views.values()):
            raise UsageError(
                f"serving cluster {name} runs, and this config differs from it ({what}). To change it, `gnnfleet serve "
                f"stop {name}` first; or choose another --name"
            )
        lines = [
            f"serving cluster {name} does not run, and this config differs from it ({what}): it is created again, and "
            "client keys must be made again"
        ]
        lines += [
            f"note: {view.node.label} cannot be reached ({view.unreachable}); a graph server that still runs there is "
            f"no longer in the cluster. {how_to_stop(view.node)}"
            for view in views.values()
            if view.unreachable
        ]

        def move(k: int) -> None:
            node, transport = run.nodes[k], run.transports[k]
            clear_node(node, transport, keeps_key=False)
            words = ("bash", "-c", 'rm -rf -- "$1-before" && mv -- "$1" "$1-before"', "bash", node.run_dir)
            done = transport.run(Command(words), timeout=_TIMEOUT)
            if done.returncode:
                raise FleetError(f"{node.label}: {done.stderr.decode('utf-8', 'replace').strip()}")

        on_nodes([k for k, view in views.items() if view.reached and not view.absent], move).or_raise()
    for text in lines:
        console.print(text, soft_wrap=True, markup=False, highlight=False)


# -- starting servers ------------------------------------------------------------------------------


def _start_missing(context: _ServeContext, found: _ServingState) -> _Served:
    """Start the servers that do not run, and send the new list of servers to those that do."""
    to_start = found.to_start
    left = [
        f"{found.seen[k].view.node.label} cannot be reached ({found.seen[k].view.unreachable}); it was not changed"
        for k in found.unreachable
    ]
    if to_start:
        plan = _new_plan(context, found)
        cluster_text = plan.nodes[to_start[0]].file("cluster.json").content
        cluster = read_description(cluster_text, context.run_id)
        context.say(f"serving cluster {cluster.name}: {cluster.words}")
        for server, row in zip(cluster.servers, server_rows(cluster), strict=True):
            context.say(row + ("" if server.node_rank in to_start else "  (running)"))

        # Start them with their files, and wait until they serve; on any error, they are stopped.
        new = replace(plan, nodes=tuple(plan.nodes[k] for k in found.to_start))
        transports = {k: each for k in found.to_start if isinstance(each := found.connections[k], Transport)}
        with start_lock(new, transports):
            for k in transports:
                if found.plan is not None:  # what earlier servers left
                    clear_node(found.plan.nodes[k], transports[k], keeps_key=new.encrypted)
            context.enter_stage("sync")
            send_files(context, new, transports)
            files = [file for one in found.seen.values() for file in one.files.items()]
            keys = [(path, text) for path, text in files if path.startswith("clients/")]
            for node in new.nodes:
                for path, text in keys:
                    transports[node.node_rank].write(text.encode(), f"{node.run_dir}/{path}", mode=0o600)
            context.keep_plan(plan)  # after sending: the plan names the programs that other commands run on the nodes
            context.enter_stage("start")
            context.say(f"starting {count(len(new.nodes), 'graph server')}")
            start_servers(new, transports, context.config.run)
    else:
        assert found.plan is not None
        plan, cluster = found.plan, newest_description(found.seen, context.run_id)
        texts = (one.files.get("cluster.json", "") for one in found.seen.values())
        cluster_text = next(text for text in texts if text and read_description(text, "") == cluster)
    behind = [k for k in found.alive if found.seen[k].files.get("cluster.json") != cluster_text]
    if not to_start and not behind:
        context.say("nothing to do: every reachable server is running")
        return _Served(cluster, (), tuple(left), context.folder)
    run_text = run_json(plan)

    def update(k: int, transport: Transport) -> None:
        # Servers read cluster.json again when it changes, so it is written last.
        transport.write(run_text.encode(), f"{plan.nodes[k].run_dir}/run.json", mode=0o600)
        transport.write(cluster_text.encode(), f"{plan.nodes[k].run_dir}/cluster.json", mode=0o644)

    errors = on_connections({k: found.connections[k] for k in behind}, update)
    left += [
        f"{plan.nodes[k].label} did not get the new list of servers ({reason_of(error)}); serve again when it is "
        "reachable"
        for k, error in sorted(errors.items())
    ]
    context.done()
    return _Served(cluster, to_start, tuple(left), context.folder)


def _new_plan(context: _ServeContext, found: _ServingState) -> LaunchPlan:
    """Return the plan of the cluster, in which servers that run keep theirs.

    A server that starts again keeps its port unless another process uses it now.
    """
    draft = offline_plan(found.config, context.run_id)
    connections = {k: found.connections[k] for k in found.to_start}
    facts, _ = require_preflight(context, connections, draft, new_run=found.plan is None)
    ports = {node.node_rank: node.service_port for node in found.plan.nodes} if found.plan else {}

    def with_old_port_first(k: int, fact: NodeFacts) -> NodeFacts:
        return replace(fact, free_ports=tuple(sorted(fact.free_ports, key=lambda port: port != ports.get(k))))

    context.enter_stage("partition")
    keys = (one.files["service.key"] for one in found.seen.values() if "service.key" in one.files)
    plan = make_plan(
        found.config,
        run_id=context.run_id,
        facts={k: with_old_port_first(k, fact) for k, fact in facts.items()},
        manifest=context.parts(found.config),
        token=new_token(),
        operator=user_at_host(),
        before=found.plan,
    )
    return final_plan(plan, Secret(next(keys, "")))


class _ServeContext(LaunchContext):
    """State of one ``gnnfleet serve`` command.

    ``running``: whether the cluster was running before the command. If so, its recorded stage and result do not change
    until all servers run.
    """

    def __init__(self, config: ResolvedConfig, options: LaunchOptions, name: str, console: Console, *, running: bool):
        self.running = running
        super().__init__(config, options, name, console)

    def _open_folder(self) -> EventLog:
        if not self.running:
            return super()._open_folder()
        return EventLog(self.folder / "events.jsonl", sys.stdout if self.options.as_json else None)

    def enter_stage(self, stage: Stage, *, detached: bool = False) -> None:
        # The launch.json of a running cluster is left alone.
        if self.running and not detached:
            self.events.add("stage", stage=stage)
        else:
            super().enter_stage(stage, detached=detached)

    def give_up(self, state: RunState, why: str, exit_status: int) -> None:
        if self.running:
            self.events.add("given-up", stage=self.file.stage, reason=why)
        else:
            super().give_up(state, why, exit_status)

    def keep_plan(self, plan: LaunchPlan) -> None:
        """Write config.yml and run.json of the cluster and register it; to be called before anything is started."""
        self.write_file("config.yml", to_yaml(self.config))
        self.write_file("run.json", run_json(plan))
        register(self.run_id, self.folder)

    def done(self) -> None:
        (self.folder / "result.json").unlink(missing_ok=True)
        self.enter_stage("train", detached=True)
