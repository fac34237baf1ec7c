"""Commands on existing runs: status, logs, profile, follow, attach, stop, collect, runs and resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.options import (
    DETACH,
    HOST_FILTERS,
    JSON,
    LIVE,
    NOW,
    RUN,
    SET,
    WAIT,
    GroupedOptions,
    console_of,
    echo_json,
    examples,
    with_options,
)
from launcher.run.config_of_options import overrides_of, read_config, wait_limit
from launcher.run.options import LaunchOptions
from launcher.text import say

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.manage.node_views import OpenRun
    from launcher.manage.select import Choice
    from launcher.report.run_folder import FoundRun
    from launcher.run.interrupts import OnInterrupt


@click.command(
    cls=GroupedOptions,
    epilog="Exit status: 0 it is running or done; 1 it failed or never started; 130 it was stopped; 3 unknown, as no "
    "node can be reached.\n\n" + examples("status toy-2026 --watch"),
)
@with_options(*RUN, JSON)
@click.option("--watch", is_flag=True, help="Update the status every 2 s until the run has ended.")
@click.pass_context
def status(ctx: click.Context, watch: bool, **values: Any) -> None:
    """Show the state of a run and of each node.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. Works on any
    machine that can reach the run's nodes.
    """
    from launcher.manage.status import rendered, status_now, watch_status
    from launcher.report.verdict import known_without_nodes

    console, as_json = _console(ctx, values)
    with _open(ctx, values, known_without_nodes) as run:
        state = watch_status(run, console) if watch and not as_json else status_now(run)
    if as_json:
        echo_json(state.to_json())
    elif not watch:
        console.print(rendered(state), soft_wrap=True)
    ctx.exit(state.verdict.exit_status)


@click.command(cls=GroupedOptions, epilog=examples("logs --rank 3 --since 10m", "logs toy-2026 -f --node 1"))
@with_options(*RUN)
@click.option("--follow", "-f", "follows", is_flag=True, help="Print new lines until the run has ended.")
@click.option("--node", type=click.IntRange(0), metavar="N", help="Only lines of node N.")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Only lines of rank R.")
@click.option("--since", metavar="WHEN", help="Only newer lines: 10m, 2h, 12:30, or an ISO time.")
@click.option("-n", "last", type=click.IntRange(0), metavar="LINES", help="Only the last LINES lines.")
@click.option("--all", "every", is_flag=True, help="Add supervisors, graph servers and rank runners.")
@click.option("--times", "-t", is_flag=True, help="Print the time of each line, by this machine's clock.")
@click.pass_context
def logs(ctx: click.Context, follows: bool, since: str | None, times: bool, **values: Any) -> None:
    """Print the log lines of all ranks, sorted by time.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. Lines are read
    from the nodes, or from the run folder after the run was collected. -f starts with the last ten lines of each rank.
    """
    from launcher.manage import show_logs as showlogs
    from launcher.run.live_log import LinePrinter

    when = showlogs.since_when(since) if since else None
    wanted = showlogs.LogFilter(values["node"], values["rank"], when, values["last"], values["every"])
    console, _ = _console(ctx, values)
    with _open(ctx, values, showlogs.all_collected) as run:
        plan = run.found.needed_plan
        printer = LinePrinter(console, plan, times=times, every=wanted.every)
        follows = follows and not showlogs.all_collected(run.found)
        missing = (showlogs.follow_logs if follows else showlogs.print_logs)(run, wanted, printer)
    for line in showlogs.missing_words(missing, plan):
        say(line, "yellow")
    ctx.exit(1 if missing else 0)


@click.command(cls=GroupedOptions, epilog=examples("profile toy-2026"))
@with_options(*RUN, JSON)
@click.pass_context
def profile(ctx: click.Context, **values: Any) -> None:
    """Show where a run spends its time. docs/operating.md says what shortens each kind of work.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. A run that is
    still running is profiled up to now. `python -m trainer profile RUN_DIR` shows each rank of one node.
    """
    from launcher.manage.profile_run import run_profile
    from launcher.manage.show_logs import all_collected, missing_words
    from launcher.report.profile import print_profile

    console, as_json = _console(ctx, values)
    with _open(ctx, values, all_collected) as run:
        found, missing = run_profile(run)
    if as_json:
        echo_json({"run_id": run.found.run_id, **found.summary})
    else:
        result = run.found.result
        print_profile(found, console, ended=result is not None and result["state"] != "detached")
    for line in missing_words(missing, run.found.needed_plan):
        say(line, "yellow")
    ctx.exit(1 if missing else 0)


@click.command(cls=GroupedOptions, epilog=examples("follow toy-2026 --plain"))
@with_options(*RUN, JSON, *LIVE)
@click.pass_context
def follow(ctx: click.Context, plain: bool, on_interrupt: OnInterrupt | None, **values: Any) -> None:
    """Show a run live until it ends, as its launcher does.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. When the run
    ends, it is collected and reported. If following ends earlier, the run continues. To stop the run, press Ctrl-C and
    answer s, or press Ctrl-C twice.

    Exit status: that of the run; 0 if it is still running.
    """
    from launcher.report.verdict import known_without_nodes

    console, as_json = _console(ctx, values)
    with _open(ctx, values, known_without_nodes) as run:
        if known_without_nodes(run.found):
            ctx.exit(_show_over(run.found, console, as_json))
        from launcher.manage.collect_run import folder_for
        from launcher.manage.follow import follow as follow_run

        folder = folder_for(run, _choice(ctx, values).runs_dirs[0])
        report = follow_run(run, folder, console, on_interrupt=on_interrupt, plain=plain, as_json=as_json)
        if report.state != "detached":
            _leave_serving(run.found, console)
    if as_json:
        click.echo(json.dumps({"kind": "report", **report.to_json()}))
    ctx.exit(report.exit_status)


@click.command(cls=GroupedOptions, epilog=examples("attach toy-2026"))
@with_options(*RUN)
@click.option("--print", "only_print", is_flag=True, help="Only print the command for each node.")
@click.pass_context
def attach(ctx: click.Context, only_print: bool, **values: Any) -> None:
    """Show the tmux sessions of all nodes, one pane each.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. The panes are
    read-only. Ctrl-b d leaves them; the run continues.
    """
    from launcher.manage.attach import enter, make_session, panes_of

    with _open(ctx, values, lambda found: True) as run:
        panes = panes_of(run.found)
        run_id = run.found.run_id
    if only_print:
        for pane in panes:
            click.echo(pane.command)
        return
    if not sys.stdin.isatty():
        raise click.UsageError("attach needs a terminal; --print shows the command for each node", ctx)
    ctx.exit(enter(make_session(run_id, panes)))


@click.command(cls=GroupedOptions, epilog=examples("stop toy-2026"))
@with_options(*RUN, JSON, NOW)
@click.pass_context
def stop(ctx: click.Context, now: bool, **values: Any) -> None:
    """Stop a run on all its nodes, then collect its files.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. The launcher of
    the run need not be running. Other runs are not affected.

    Exit status: 0 if nothing of the run is left on the nodes; else 1.
    """
    from launcher.manage.stop import end_run
    from launcher.report.verdict import known_without_nodes

    console, as_json = _console(ctx, values)
    with _open(ctx, values, known_without_nodes) as run:
        ended = end_run(run, _choice(ctx, values).runs_dirs[0], console, now=now)
        if ended.exit_status == 0:
            _leave_serving(run.found, console)
    if as_json:
        echo_json(ended.to_json())
    ctx.exit(ended.exit_status)


@click.command(cls=GroupedOptions, epilog=examples("collect toy-2026"))
@with_options(*RUN, JSON)
@click.pass_context
def collect(ctx: click.Context, **values: Any) -> None:
    """Copy logs, metrics, checkpoint and output of a run here.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. Of a run that
    is still running, the files written so far are copied. Files that are already here are not copied again.

    Exit status: that of the run; 0 if it is still running; 1 if it is unknown because nodes cannot be reached.
    """
    from launcher.manage.collect_run import collect_run, folder_for
    from launcher.report.verdict import known_without_nodes

    console, as_json = _console(ctx, values)
    with _open(ctx, values, known_without_nodes) as run:
        if known_without_nodes(run.found):
            ctx.exit(_show_over(run.found, console, as_json))
        collected = collect_run(run, folder_for(run, _choice(ctx, values).runs_dirs[0]))
        if collected.report is not None:
            _leave_serving(run.found, console)
    if collected.report is not None:
        from launcher.report.report import print_report

        print_report(collected.report, console)
    else:
        console.print(collected.message, soft_wrap=True, markup=False)
        for note in collected.notes:
            console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)
    if as_json:
        echo_json(collected.to_json())
    ctx.exit(collected.exit_status)


@click.command(cls=GroupedOptions, epilog=examples("runs -n 5"))
@click.option("--runs-dir", metavar="DIR", help="Local folder of runs; default: runs.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")
@click.option("-n", "last", type=click.IntRange(1), metavar="N", help="Only the newest N runs.")
@click.pass_context
def runs(ctx: click.Context, last: int | None, **values: Any) -> None:
    """List the runs known on this machine and their results."""
    from launcher.report.run_history import history, rendered, to_json

    console, as_json = _console(ctx, values)
    entries = history(_choice(ctx, values).runs_dirs, last)
    if as_json:
        click.echo(to_json(entries))
    elif entries:
        console.print(rendered(entries))
    else:
        console.print("no runs on this machine yet")


@click.command(
    cls=GroupedOptions, epilog=examples("resume toy-2026 --epochs 40 --detach", "resume toy-2026 --exclude gnn3")
)
@with_options(*RUN, JSON, SET, *HOST_FILTERS)
@click.option("--epochs", metavar="N", help="Total passes, including those already made.")
@click.option("--master-addr", metavar="ADDR", help="Address at which nodes reach the lead node.")
@click.option("--run-id", metavar="ID", help="Id of the new run; default: from name and time.")
@with_options(WAIT, DETACH, *LIVE)
@click.pass_context
def resume(
    ctx: click.Context,
    sets: tuple[str, ...],
    epochs: str | None,
    master_addr: str | None,
    on_interrupt: str | None,
    **values: Any,
) -> None:
    """Launch a run again from its newest checkpoint.

    RUN is a run id, a part of one, or a run folder; default: the newest that can be resumed. The config and your own
    command are those of RUN, except for what the options change. --exclude leaves out a lost host; it also applies when
    the new run is resumed.
    """
    from launcher.manage.resume import go_to, prepare
    from launcher.manage.submit import in_queue, submit_and_follow
    from launcher.report.run_history import resumable_run
    from launcher.report.verdict import known_without_nodes
    from launcher.run.launch import launch
    from launcher.serving.attach_run import attach_of

    console, as_json = _console(ctx, values)
    before: Mapping[str, Any] = ctx.obj or {}
    changed = {"epochs": epochs, "master_addr": master_addr, "on_interrupt": on_interrupt}
    include, exclude = ((*(before.get(name) or ()), *values[name]) for name in ("include", "exclude"))
    asked = LaunchOptions(
        config=Path(),
        overrides=overrides_of(changed, sets),
        include=include,
        exclude=exclude,
        run_id=values["run_id"],
        own_command=ctx.meta.get("own_command", ()),
        as_json=as_json,
        plain=values["plain"],
        detach=values["detach"],
        wait=wait_limit(values["wait"]),
    )
    if values["run"] is None and _choice(ctx, values).config is None:
        other = bool(asked.overrides or asked.own_command)
        values["run"] = str(resumable_run(_choice(ctx, values).runs_dirs, changed=other).folder)
    with _open(ctx, values, known_without_nodes) as run:
        again = prepare(run, _choice(ctx, values).runs_dirs[0], asked)
    for text in (*again.notes, again.message):
        console.print(text, soft_wrap=True, markup=False)
    config = read_config(again.options)
    go_to(again.cwd)
    if in_queue(config):
        ctx.exit(submit_and_follow(config, again.options, console))
    report = launch(config, again.options, console, attach_of(config, again.options.config, console))
    if as_json:
        click.echo(json.dumps({"kind": "report", **report.to_json()}))
    ctx.exit(report.exit_status)


_COMMANDS = (status, logs, profile, follow, attach, stop, collect, runs, resume)


def register_commands(group: click.Group) -> None:
    for command in _COMMANDS:
        group.add_command(command)


def _choice(ctx: click.Context, values: Mapping[str, Any]) -> Choice:
    """Return the options that select a run; those after the subcommand take precedence over those before it."""
    from launcher.manage.select import Choice

    before: Mapping[str, Any] = ctx.obj or {}
    config, runs_dir = (values.get(name) or before.get(name) for name in ("config", "runs_dir"))
    return Choice(values.get("run"), config, tuple(before.get("sets") or ()), runs_dir)


def _open(
    ctx: click.Context, values: Mapping[str, Any], offline: Callable[[FoundRun], bool]
) -> AbstractContextManager[OpenRun]:
    from launcher.manage.select import chosen

    return chosen(_choice(ctx, values), offline=offline)


def _console(ctx: click.Context, values: Mapping[str, Any]) -> tuple[Console, bool]:
    """Return the console, and whether stdout is for JSON."""
    as_json = bool(values.get("as_json") or (ctx.obj or {}).get("as_json"))
    return console_of(as_json), as_json


def _show_over(found: FoundRun, console: Console, as_json: bool) -> int:
    """Print how a run ended according to its run folder; return the exit status."""
    from launcher.manage.status import Status, rendered
    from launcher.report.verdict import from_here

    state = Status(found, from_here(found), {})
    if as_json:
        echo_json(state.to_json())
    else:
        console.print(rendered(state), soft_wrap=True)
    return int((found.result or {}).get("exit_status", state.verdict.exit_status))


def _leave_serving(found: FoundRun, console: Console) -> None:
    """Revoke the key that an ended run used for its serving cluster; print a note for each server where this fails."""
    from launcher.serving.attach_run import leave

    for note in leave(found):
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)
