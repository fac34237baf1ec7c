"""Launches a run: connect, preflight, partition, plan, sync, start, follow."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.command import Secret
from launcher.config.loader import to_yaml
from launcher.config.resolve import ResolvedConfig, resolve_run
from launcher.config.roles import ServingCluster
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, Interrupted, OutOfReach, PreflightRefused, TransportError, UsageError
from launcher.files import write_whole
from launcher.plan.build import final_plan, make_plan, new_token, offline_plan
from launcher.plan.model import LaunchPlan, NodeFacts
from launcher.plan.partition import PartitionFiles
from launcher.plan.render import print_placement
from launcher.plan.serialize import run_json
from launcher.plan.trainable import check_model_class, check_trainable
from launcher.preflight.preflight import run_preflight, without_busy_ports
from launcher.report.events import EventLog
from launcher.report.launch_file import LaunchFile, Stage, user_at_host
from launcher.report.report import RunReport, RunState
from launcher.report.run_folder import clear, register
from launcher.run.check import show_findings
from launcher.run.interrupts import Interrupts
from launcher.run.lifecycle import RunContext, conduct
from launcher.run.options import LaunchOptions, choose_run_id, run_folder
from launcher.run.tmux_session import start_session
from launcher.sync.parts import held_parts
from launcher.sync.progress import transfer_progress
from launcher.sync.push import sync
from launcher.text import count, spans
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from trainer.core.train_config import is_own_model

_PORTS_STAY_FREE = 1.0  # seconds; a launch that has waited longer for its parts looks again which ports are busy


@dataclass
class Attachment:
    """The serving cluster that a run attaches to, and the client key of the run."""

    serving: ServingCluster
    key: Secret  #: content of the run's service.key; '' for a cluster without encryption
    #: Tests the routes from the nodes to the graph servers; returns notes, raises PreflightRefused.
    check_reachable: Callable[[LaunchPlan, Mapping[int, Transport]], list[str]]
    run_continues: bool = False  #: the launcher has detached: the key must stay valid


#: Maps a run id to a context manager that gives the run access to the serving cluster.
Attach = Callable[[str], AbstractContextManager[Attachment]]


class LaunchContext(RunContext):
    """A run in the process that launches it: what was asked for, and what all stages of the launch share.

    Its constructor creates and registers the run folder, and writes ``config.yml`` and ``launch.json``.
    """

    def __init__(self, config: ResolvedConfig, options: LaunchOptions, run_id: str, console: Console):
        self.config, self.options, self.run_id, self.console = config, options, run_id, console
        self.folder = run_folder(config, run_id)
        self.file = options.launch_file(run_id, config.name, job=(config.slurm_job or "") if _in_batch_job() else "")
        self.notes: tuple[str, ...] = ()  #: findings that block the launch, for result.json
        super().__init__(config.run, self.folder, self.file.started, self._open_folder(), console, options.plain)
        self.held = ExitStack()  #: closed when the parts have been sent: until then nobody replaces them

    def parts(self, config: ResolvedConfig) -> PartitionFiles | None:
        """Return the parts of a run or serving cluster; makes them first if needed, and holds them."""
        who = f"{self.run_id} of {user_at_host()} (pid {os.getpid()})"
        return held_parts(config, self.console, who, self.held)

    def _open_folder(self) -> EventLog:
        # config.yml comes before launch.json, by which other commands find the launch.
        try:
            queued = LaunchFile.read(self.folder) if _in_batch_job() else None
            if queued is not None and queued.stage == "queue":  # names the user's file, which this launch has a copy of
                self.file = replace(self.file, config=queued.config)
            clear(self.folder)
            write_whole(self.folder / "config.yml", to_yaml(self.config), private=True)
            if why := register(self.run_id, self.folder):
                self.say(why, "yellow")
            self.file.write(self.folder)
            return EventLog(self.folder / "events.jsonl", sys.stdout if self.options.as_json else None)
        except OSError as error:
            raise UsageError(
                f"the run folder cannot be created: {error.filename or self.folder}: {error.strerror}; "
                "choose another folder with --runs-dir (or `run.runs_dir`)"
            ) from None

    def enter_stage(self, stage: Stage, *, detached: bool = False) -> None:
        """Record in launch.json and events.jsonl that ``stage`` begins."""
        self.file = self.file.at(stage, detached=detached)
        try:
            self.file.write(self.folder)
        except OSError as error:  # a full disk here must not end the run on the nodes
            self.say(f"cannot write {self.folder}: {error.strerror}", "yellow")
        self.events.add("stage", stage=stage)

    def write_file(self, name: str, text: str) -> None:
        """Write a file of the run folder on this machine. Raises FleetError when it cannot be written."""
        try:
            write_whole(self.folder / name, text, private=True)
        except OSError as error:
            raise FleetError(
                f"{self.folder / name} cannot be written: {error.strerror}; nothing has been started. Free disk space, "
                "or choose another folder with --runs-dir (or `run.runs_dir`)"
            ) from None

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style), soft_wrap=True)

    def give_up(self, state: RunState, why: str, exit_status: int) -> None:
        """Record that the launch has ended without a report: before a run was started, or by Ctrl-C.

        Writes to events.jsonl, to launch.json and, unless it exists, to result.json.
        """
        self.events.add("given-up", stage=self.file.stage, reason=why)
        if not (self.folder / "result.json").exists():
            seconds = time.time() - self.started
            notes = [*(self.notes or (why,))]
            report = RunReport(self.run_id, self.folder, state=state, seconds=seconds, notes=notes)
            values = {**report.to_json(), "exit_status": exit_status}
            try:
                write_whole(self.folder / "result.json", json.dumps(values, indent=1) + "\n")
            except OSError as error:
                self.say(f"cannot write {self.folder}: {error.strerror}", "yellow")
        self.enter_stage("end")


def launch(config: ClusterConfig, options: LaunchOptions, console: Console, attach: Attach | None = None) -> RunReport:
    """Launch a run of ``config``, follow it to its end, collect its files, and print and return its report.

    ``attach``: attaches the run to the serving cluster from which it reads. With ``options.detach``, returns after the
    first training step. Raises FleetError for a failure before anything runs on the nodes, Interrupted, and OutOfReach
    for a run that goes on without this machine; failures on the nodes are in the report.
    """
    if options.nodes_needed:
        from launcher.run.choose_hosts import choose_hosts

        config = choose_hosts(config, options, console)
    resolved = resolve_run(config)
    run_id = choose_run_id(config, options.run_id)
    # finds mistakes in the own command and in local parts before any connection is made
    draft = offline_plan(resolved, run_id, options.own_command, to_train=True)
    with ExitStack() as turn:
        with suppress(OSError):  # LaunchContext reports a folder that cannot be made
            runs_dir = run_folder(resolved, run_id).parent
            runs_dir.mkdir(parents=True, exist_ok=True)
            lock = os.open(runs_dir, os.O_RDONLY)
            turn.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two launches with one run id, one makes the folder
        choose_run_id(config, run_id)  # refuses it if another launch has made the folder meanwhile
        context = LaunchContext(resolved, options, run_id, console)
    with ExitStack() as whole:
        interrupts = whole.enter_context(Interrupts())
        whole.enter_context(closing(context.events))
        whole.enter_context(context.held)
        warning = None
        if _in_batch_job():
            from launcher.run.batch_job import JobWarning, request_checkpoint, requeue_job

            warning = whole.enter_context(JobWarning(interrupts))
        try:
            with ExitStack() as opened:  # left before the end of the launch is recorded
                attached = opened.enter_context(attach(run_id)) if attach else None

                # Connect to every node, and check it.
                context.events.add("stage", stage="connect")
                context.say(f"run {run_id}: connecting to {count(len(resolved.nodes), 'node')}")
                connections = connect_all(resolved)
                opened.callback(close_all, connections)
                facts, transports = require_preflight(context, connections, draft)

                # Partition the graph, unless its parts are there, and plan the run.
                context.enter_stage("partition")
                began = time.monotonic()
                manifest = context.parts(resolved)
                if time.monotonic() - began > _PORTS_STAY_FREE:
                    facts = without_busy_ports(resolved, facts, transports)
                if manifest is not None and not options.own_command:
                    check_trainable(resolved, manifest)
                    if manifest.fingerprint not in draft.nodes[draft.lead].data_dir:  # made since the draft
                        check_model_class(resolved.train, manifest)
                plan = make_plan(
                    resolved,
                    run_id=run_id,
                    facts=facts,
                    own_command=options.own_command,
                    manifest=manifest,
                    token=new_token(),
                    operator=user_at_host(),
                    serving=attached.serving if attached else None,
                    queued_at=context.started if options.wait is not None else 0.0,
                    wait_limit=options.wait or 0.0,
                )
                plan = final_plan(plan, attached.key if attached else None)
                for note in attached.check_reachable(plan, transports) if attached else ():
                    context.say(f"note: {note}", "yellow")
                if warning is not None:
                    warning.save = partial(request_checkpoint, plan, transports, context.say)
                print_placement(plan, console)
                context.write_file("run.json", run_json(plan))
                if plan.train is not None and is_own_model(plan.train.model):
                    _keep_model_files(plan, context.folder)

                # Send code and parts, or verify parts that are in place.
                interrupts.message = "interrupted; the next launch reuses the files that have been sent so far"
                context.enter_stage("sync")
                send_files(context, plan, transports)

                # Start the nodes, and follow the run to its end.
                lead = plan.nodes[plan.lead]
                where = f"{count(len(plan.nodes), 'node')}, node {plan.lead} in {lead.place}"
                context.say(f"starting {count(plan.world_size, 'process', 'es')} on {where}")
                context.enter_stage("start")
                timeout = resolved.run.start_timeout
                report = conduct(
                    context,
                    plan,
                    transports,
                    interrupts,
                    starts={
                        node.node_rank: partial(start_session, transports[node.node_rank], node, start_timeout=timeout)
                        for node in plan.nodes
                    },
                    offsets={k: fact.clock_offset for k, fact in facts.items()},
                    leave_when_trained=options.detach,
                )
                detached = report.state == "detached"
                context.enter_stage("train" if detached else "end", detached=detached)
                if attached:
                    attached.run_continues = detached
        except KeyboardInterrupt:
            context.give_up("stopped", interrupts.message, Interrupted.exit_status)
            raise Interrupted(interrupts.message) from None
        except OutOfReach:
            context.enter_stage("train", detached=True)
            raise
        except FleetError as error:
            context.give_up("failed", str(error), error.exit_status)
            raise

    # A batch job that has lost a node, or that has used its time, is requeued, to resume the run; not one that stalled.
    first = report.first_failure if report.state == "failed" else None
    lost_node = first is not None and first.name == "node" and not first.found
    if warning is not None and (lost_node or (warning.received and report.state == "stopped")):
        requeue_job(resolved, run_id, context.folder, context.say)
    return report


def _keep_model_files(plan: LaunchPlan, folder: Path) -> None:
    """Copy the files of the user's model class to the run folder, from which its checkpoints are loaded again."""
    node = plan.nodes[plan.lead]
    for file in node.files:
        if file.source and file.dest.startswith(f"{node.run_dir}/files/"):
            target = folder / file.dest.removeprefix(f"{node.run_dir}/")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.source, target)
            except OSError as error:
                raise FleetError(f"{target} cannot be written: {error.strerror}; nothing has been started") from None


def require_preflight(
    context: LaunchContext,
    connections: Mapping[int, Transport | TransportError],
    draft: LaunchPlan,
    *,
    new_run: bool = True,
) -> tuple[Mapping[int, NodeFacts], dict[int, Transport]]:
    """Run preflight; return the facts and the transports, both by node_rank. Raises PreflightRefused.

    ``connections``: connection or error of each node, by node_rank. ``draft``: plan made before preflight. ``new_run``:
    also check that the nodes have no files of a run with this id.
    """
    context.enter_stage("preflight")
    run_id = context.run_id if new_run else ""
    report = run_preflight(context.config, connections, draft, run_id=run_id)
    report = report if context.options.wait is None else report.to_wait()
    noteworthy = [finding for finding in report.findings if finding.severity != "ok"]
    if noteworthy:
        show_findings(replace(report, findings=tuple(noteworthy)), context.options.config, context.console)
    context.notes = tuple(finding.line() for finding in noteworthy if finding.severity == "block")
    if context.options.as_json:
        report.refuse_if_blocked()  # its error lists the findings; the table is not part of the JSON
    if report.blocked:
        nodes = sorted({finding.node_rank for finding in noteworthy if finding.severity == "block"})
        raise PreflightRefused(
            f"preflight refused the run because of {spans(nodes, 'node')}; nothing was changed on the nodes"
        )
    context.say(f"preflight: {len(report.findings) - len(noteworthy)} checks passed")
    # The package versions of the nodes: one event for each set of nodes with equal versions.
    alike: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for k, fact in sorted(report.facts.items()):
        alike.setdefault(tuple(sorted(fact.versions.items())), []).append(k)
    for versions, nodes in alike.items():
        context.events.add("versions", nodes=nodes, versions=dict(versions))
    return report.facts, {k: connection for k, connection in connections.items() if isinstance(connection, Transport)}


def send_files(context: LaunchContext, plan: LaunchPlan, transports: Mapping[int, Transport]) -> None:
    """Send the files of ``plan`` to its nodes; with ``data.mode: verify``, first verify the parts on the nodes."""
    if context.config.data.mode == "verify" and not context.config.data.serving:
        from launcher.sync.verify_parts import verify

        checked = verify(plan, transports)
        if not context.options.own_command and not plan.serve_only:
            check_trainable(context.config, checked.manifest)
        context.say(f"verified {checked.files} files, {decimal(checked.bytes)}, in place")
        context.events.add("verified", files=checked.files, bytes=checked.bytes)
    labels = {node.node_rank: node.label for node in plan.nodes}
    with transfer_progress(context.console, labels) as progress:
        report = sync(plan, transports, progress, connect_timeout=context.config.run.connect_timeout)
    context.held.close()
    need = sum(plan.sent_bytes(node) for node in plan.nodes)
    moved = report.bytes_sent + report.bytes_present + report.bytes_fetched
    packed = " (code packed)" if report.bytes_sent and moved < need else ""
    fetched = (
        f", {decimal(report.bytes_fetched)} fetched from {context.config.data.store}"
        if context.config.data.store
        else ""
    )
    sizes = f"{decimal(report.bytes_sent)} sent{packed}{fetched}, {decimal(report.bytes_present)} already there"
    context.say(f"synced {decimal(need)} of files: {sizes}")
    for node in report.nodes:
        context.events.add(
            "synced",
            node_rank=node.node_rank,
            files=node.files_sent,
            bytes=node.bytes_sent,
            fetched=node.bytes_fetched,
            seconds=node.seconds,
        )


def _in_batch_job() -> bool:
    """Whether this process belongs to the script of a Slurm batch job (sbatch), not to an interactive job (salloc)."""
    return os.environ.get("ENVIRONMENT") == "BATCH" and bool(os.environ.get("SLURM_JOB_ID"))
