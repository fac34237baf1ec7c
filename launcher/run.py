"""A launch, from config to report: each stage is one function with a value of its own type."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.codefiles import code_digest
from launcher.collect import Collected, collect
from launcher.config import ClusterConfig
from launcher.errors import FleetError, Interrupted, PreflightRefused, TransportError
from launcher.events import EventLog
from launcher.fanout import on_nodes
from launcher.follow import Followed, Limits, RunFollower, how_to_stop
from launcher.interrupts import Interrupts
from launcher.logs import LiveLog
from launcher.offline import offline_plan
from launcher.options import LaunchOptions, choose_run_id, run_folder
from launcher.outcome import Outcome, first_failure
from launcher.partitioning import ensure_parts
from launcher.plan import LaunchPlan, NodeFacts, make_plan, to_json
from launcher.planview import print_placement
from launcher.preflight import run_preflight
from launcher.preflight_table import node_ranges, print_findings
from launcher.progress import transfer_progress
from launcher.registry import user_name
from launcher.report import Metrics, RunReport, RunState, print_report
from launcher.runfile import with_run_file
from launcher.script import Secret
from launcher.session import start_session
from launcher.sync import sync
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.verify import verify
from launcher.wholefile import write_whole
from launcher.words import count
from launcher.yaml_schema import to_yaml


@dataclass(frozen=True)
class Job:
    """What all stages of one launch share."""

    config: ClusterConfig
    options: LaunchOptions
    run_id: str
    folder: Path
    console: Console
    started: float

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style), soft_wrap=True)


def launch(config: ClusterConfig, options: LaunchOptions, console: Console) -> RunReport:
    """Launch ``config``, follow the run to its end, bring everything here, and report.

    Raises FleetError for what goes wrong before anything runs on the nodes; after that
    the report says what happened. Ctrl-C stops every node.
    """
    run_id = choose_run_id(config, options.run_id)
    job = Job(config, options, run_id, run_folder(config, run_id), console, time.time())
    draft = offline_plan(config, run_id, options.own_command)  # a mistake in the command shows before any connection
    with Interrupts() as interrupts:
        try:
            with connected(job) as attempts:
                facts, transports = passed_preflight(job, attempts, draft)
                plan = final_plan(job, facts)
                return carry_out(job, plan, facts, transports, interrupts)
        except KeyboardInterrupt:
            raise Interrupted(interrupts.meaning) from None


@contextmanager
def connected(job: Job) -> Iterator[dict[int, Transport | TransportError]]:
    """A line to every node, or why there is none; closed in the end."""
    job.say(f"run {job.run_id}: connecting to {count(len(job.config.nodes), 'node')}")
    attempts = connect_all(job.config)
    try:
        yield attempts
    finally:
        close_all(attempts)


def passed_preflight(
    job: Job, attempts: dict[int, Transport | TransportError], draft: LaunchPlan
) -> tuple[Mapping[int, NodeFacts], dict[int, Transport]]:
    """What preflight learned; raises PreflightRefused when a finding stands against the run."""
    need = {node.node_rank: sum(file.bytes for file in node.files) for node in draft.nodes}
    report = run_preflight(
        job.config, attempts, own_command=bool(job.options.own_command), bytes_needed=need, run_id=job.run_id
    )
    noteworthy = [finding for finding in report.findings if finding.severity != "ok"]
    if noteworthy:
        print_findings(replace(report, findings=tuple(noteworthy)), job.console)
    if job.options.as_json:
        report.refuse_if_blocked()  # with what stands in the way, as the table is not part of the JSON
    if report.blocked:
        nodes = sorted({finding.node_rank for finding in noteworthy if finding.severity == "block"})
        raise PreflightRefused(f"preflight refused the run because of {node_ranges(nodes)}; nothing was changed there")
    job.say(f"preflight: {len(report.findings) - len(noteworthy)} checks passed")
    return report.facts, {k: line for k, line in attempts.items() if isinstance(line, Transport)}


def final_plan(job: Job, facts: Mapping[int, NodeFacts]) -> LaunchPlan:
    """The plan that is carried out, parts made and secrets drawn."""
    manifest = ensure_parts(job.config, job.console) if job.config.data.mode == "sync" else None
    plan = make_plan(
        job.config,
        run_id=job.run_id,
        code_digest=code_digest(),
        facts=facts,
        own_command=job.options.own_command,
        manifest=manifest,
        token=Secret(secrets.token_hex(16)),
        operator=f"{user_name()}@{socket.gethostname()}",
    )
    return with_run_file(with_service_key(plan))


def with_service_key(plan: LaunchPlan) -> LaunchPlan:
    """``plan`` with a key pair drawn for its graph service, where it asks for one."""
    if not any(file.dest.endswith("/service.key") for node in plan.nodes for file in node.files):
        return plan
    import zmq

    public, secret = zmq.curve_keypair()
    content = Secret(json.dumps({"public": public.decode(), "secret": secret.decode()}))
    nodes = tuple(
        replace(
            node,
            files=tuple(
                replace(file, content=content, bytes=len(content)) if file.dest.endswith("/service.key") else file
                for file in node.files
            ),
        )
        for node in plan.nodes
    )
    return replace(plan, nodes=nodes)


def carry_out(
    job: Job,
    plan: LaunchPlan,
    facts: Mapping[int, NodeFacts],
    transports: Mapping[int, Transport],
    interrupts: Interrupts,
) -> RunReport:
    """Apply the plan: bring files, start, follow, collect, report."""
    print_placement(plan, job.console)
    write_whole(job.folder / "plan.json", to_json(plan))
    write_whole(job.folder / "config.yml", to_yaml(job.config))
    events = EventLog(job.folder / "events.jsonl")
    try:
        interrupts.meaning = "interrupted; what has been sent so far is taken up by the next launch"
        bring_files(job, plan, transports, events)
        interrupts.last_words = "\n  ".join(
            ["left at once; parts of the run may still be running.", *map(how_to_stop, plan.nodes)]
        )
        followed = conduct(job, plan, transports, events)
        interrupts.meaning = "interrupted while collecting; nothing runs any more, logs and results stay on the nodes"
        interrupts.last_words = interrupts.meaning
        return conclude(job, plan, facts, followed, collect(plan, transports, job.folder), events)
    except (FleetError, KeyboardInterrupt) as error:
        events.add("given-up", reason=str(error) or "interrupted")
        state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        notes = (str(error),) if str(error) else ()
        RunReport(job.run_id, state, (), None, Metrics(), time.time() - job.started, job.folder, notes).write()
        raise
    finally:
        events.close()


def bring_files(job: Job, plan: LaunchPlan, transports: Mapping[int, Transport], events: EventLog) -> None:
    """Send what the plan sends; in mode verify, check the parts where they are."""
    if job.config.data.mode == "verify":
        checked = verify(plan, transports)
        job.say(f"verified {checked.files} files, {decimal(checked.bytes)}, in place")
        events.add("verified", files=checked.files, bytes=checked.bytes)
    labels = {node.node_rank: node.label for node in plan.nodes}
    with transfer_progress(job.console, labels) as progress:
        report = sync(plan, transports, progress, connect_timeout=job.config.run.connect_timeout)
    job.say(f"synced: {decimal(report.bytes_sent)} sent, {decimal(report.bytes_present)} already there")
    for node in report.nodes:
        events.add(
            "synced", node_rank=node.node_rank, files=node.files_sent, bytes=node.bytes_sent, seconds=node.seconds
        )


def conduct(job: Job, plan: LaunchPlan, transports: Mapping[int, Transport], events: EventLog) -> Followed:
    """Start every node and follow the run to its end; nothing of it runs any more afterwards."""
    run = job.config.run
    limits = Limits(run.lost_after, run.grace, run.connect_timeout)
    nodes = {node.node_rank: node for node in plan.nodes}
    where = f"{count(len(nodes), 'node')}, node 0 in tmux session {plan.nodes[0].session}"
    job.say(f"starting {count(plan.world_size, 'process', 'es')} on {where}")
    with LiveLog(job.console, plan) as live:
        follower = RunFollower(plan, transports, limits, live, events)
        try:
            try:
                starts = on_nodes(
                    nodes, lambda k: start_session(transports[k], nodes[k], start_timeout=run.start_timeout)
                )
                follower.never_started(starts.errors)
            except KeyboardInterrupt:
                follower.interrupt()
            return follower.follow()
        except BaseException:
            follower.abandon()
            raise


def conclude(
    job: Job,
    plan: LaunchPlan,
    facts: Mapping[int, NodeFacts],
    followed: Followed,
    collected: Collected,
    events: EventLog,
) -> RunReport:
    """Make the report, write it, print it."""
    outcomes = tuple(_outcomes(plan, facts, followed, collected))
    states = [followed.results[node.node_rank]["state"] for node in plan.nodes if node.node_rank in followed.results]
    done = len(states) == len(plan.nodes) and set(states) == {"done"}
    state: RunState = "done" if done else "interrupted" if followed.interrupted else "failed"
    first = first_failure(outcomes) if state == "failed" else None
    notes = (*followed.notes, *collected.notes)
    seconds = time.time() - job.started
    report = RunReport(job.run_id, state, outcomes, first, collected.metrics, seconds, job.folder, notes)
    report.write()
    events.add("end", state=state, exit_status=report.exit_status, seconds=report.seconds)
    print_report(report, job.console)
    return report


def _outcomes(
    plan: LaunchPlan, facts: Mapping[int, NodeFacts], followed: Followed, collected: Collected
) -> Iterator[Outcome]:
    """Every process's end, by our clock; a lost node's own end after those of its processes."""
    for node in plan.nodes:
        k = node.node_rank
        records = followed.results[k]["outcomes"] if k in followed.results else collected.outcomes[k]
        for record in records:
            yield Outcome.from_record(record, node.target, facts[k].clock_offset)
        if k in followed.lost:
            yield followed.lost[k]
        elif followed.results.get(k, {}).get("reason", "").startswith("SIG"):
            when = min((record["ended"] for record in records if record["ended"]), default=time.time())
            here = when - facts[k].clock_offset
            yield Outcome.of_stopped_node(k, node.target, followed.results[k]["reason"], here)
