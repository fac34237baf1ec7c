"""Commands on launched runs: status, logs, profile, follow, attach, stop, collect, runs, resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import run_ids
from launcher.cli.options import (
    DETACH,
    HOST_FILTERS,
    JSON,
    LIVE,
    NOW,
    RUN,
    SET,
    console_of,
    echo_json,
    examples,
    with_options,
)
from launcher.run.options import LaunchOptions, overrides_of, read_config

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.manage.collect_run import CollectResult
    from launcher.manage.node_views import OpenRun
    from launcher.manage.select import Choice
    from launcher.report.run_folder import FoundRun
    from launcher.run.interrupts import OnInterrupt


@click.command(
    epilog=examples("status", "status toy-2026 --watch", "status --config cluster.yml")
    + "\n\nExit status: 0 it runs or is done, 1 failed or never started, 130 stopped, 3 no node can tell."
)
@with_options(*RUN, JSON)
@click.option("--watch", is_flag=True, help="Show it again every 2 s until the run has ended.")
@click.pass_context
def status(ctx: click.Context, watch: bool, **values: Any) -> None:
    """How a run is, from any machine that reaches its nodes.

    RUN is a run's id, a part of one, or its folder; by default the newest.
    """
    from launcher.manage.status import rendered, status_now, watch_status
    from launcher.report.verdict import known_without_nodes

    console, as_json = _console(ctx, values)
    with _open(ctx, values, known_without_nodes) as run:
        told = watch_status(run, console) if watch and not as_json else status_now(run)
    if as_json:
        echo_json(told.to_json())
    elif not watch:
        console.print(rendered(told), soft_wrap=True)
    ctx.exit(told.verdict.exit_status)


@click.command(epilog=examples("logs", "logs --rank 3 --since 10m", "logs toy-2026 -f --node 1", "logs --all -n 100"))
@with_options(*RUN)
@click.option("--follow", "-f", "follows", is_flag=True, help="Go on with new lines until the run has ended.")
@click.option("--node", type=click.IntRange(0), metavar="N", help="Of one node alone.")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Of one rank alone.")
@click.option("--since", metavar="WHEN", help="Since then: 10m, 2h, 12:30, or an ISO time.")
@click.option("-n", "last", type=click.IntRange(0), metavar="LINES", help="Only so many last lines.")
@click.option("--all", "every", is_flag=True, help="Also of supervisors, graph servers and rank runners.")
@click.option("--times", "-t", is_flag=True, help="With the time of each line, by this machine's clock.")
@click.pass_context
def logs(ctx: click.Context, follows: bool, since: str | None, times: bool, **values: Any) -> None:
    """Lines of all ranks, merged in order of time.

    RUN is a run's id, a part of one, or its folder; by default the newest. Lines come from the nodes,
    or from the run folder once they have been collected. -f begins with the last ten lines of each rank.
    """
    from launcher.manage import show_logs as showlogs

    when = showlogs.since_when(since) if since else None
    wanted = showlogs.Wanted(values["node"], values["rank"], when, values["last"], values["every"])
    console, _ = _console(ctx, values)
    with _open(ctx, values, showlogs.all_collected) as run:
        plan = run.found.needed_plan
        printer = showlogs.LinePrinter(console, plan, times=times, every=wanted.every)
        follows = follows and not showlogs.all_collected(run.found)
        missing = (showlogs.follow_logs if follows else showlogs.print_logs)(run, wanted, printer)
    for line in showlogs.missing_words(missing, plan):
        click.secho(line, fg="yellow", err=True)
    ctx.exit(1 if missing else 0)


@click.command(epilog=examples("profile", "profile toy-2026 --json"))
@with_options(*RUN, JSON)
@click.pass_context
def profile(ctx: click.Context, **values: Any) -> None:
    """Where a run's time goes, and what would help.

    RUN is a run's id, a part of one, or its folder; by default the newest. Of a run that goes on, what its
    ranks have told by now. `python -m trainer profile RUN_DIR` shows each rank of one node.
    """
    from launcher.manage import profile_run as profiled
    from launcher.manage.show_logs import all_collected, missing_words

    console, as_json = _console(ctx, values)
    with _open(ctx, values, all_collected) as run:
        found, missing = profiled.run_profile(run)
    if as_json:
        echo_json(profiled.to_json(run, found))
    else:
        profiled.show_profile(found, console)
    for line in missing_words(missing, run.found.needed_plan):
        click.secho(line, fg="yellow", err=True)
    ctx.exit(1 if missing else 0)


@click.command(epilog=examples("follow", "follow toy-2026 --plain"))
@with_options(*RUN, JSON, *LIVE)
@click.pass_context
def follow(ctx: click.Context, plain: bool, on_interrupt: OnInterrupt | None, **values: Any) -> None:
    """Watch a run as its launcher does, to its end.

    RUN is a run's id, a part of one, or its folder; by default the newest. At its end it is collected and
    reported. However the watching ends, the run goes on, unless you answer Ctrl-C with s or press it twice.
    Exit status: the run's; 0 while it goes on.
    """
    console, as_json = _console(ctx, values)
    with _open(ctx, values, _is_over_here) as run:
        if _is_over_here(run.found):
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


@click.command(epilog=examples("attach", "attach toy-2026 --print"))
@with_options(*RUN)
@click.option("--print", "only_print", is_flag=True, help="Print the command for each node, and do nothing.")
@click.pass_context
def attach(ctx: click.Context, only_print: bool, **values: Any) -> None:
    """Look into the nodes' tmux sessions, a pane per node.

    RUN is a run's id, a part of one, or its folder; by default the newest. Leave with Ctrl-b d; the run
    goes on. Panes are read-only.
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


@click.command(epilog=examples("stop", "stop toy-2026 --now"))
@with_options(*RUN, JSON, NOW)
@click.pass_context
def stop(ctx: click.Context, now: bool, **values: Any) -> None:
    """Stop a run on all its nodes, then collect.

    RUN is a run's id, a part of one, or its folder; by default the newest. What became of its launcher
    does not matter, and other runs are not touched. Exit status 0 when nothing of the run is left, else 1.
    """
    from launcher.manage.stop import end_run
    from launcher.report.verdict import known_without_nodes

    console, as_json = _console(ctx, values)
    with _open(ctx, values, known_without_nodes) as run:
        ended = end_run(run, _choice(ctx, values).runs_dirs[0], console, now=now)
        if ended.clean:
            _leave_serving(run.found, console)
    if as_json:
        echo_json(ended.to_json())
    ctx.exit(ended.exit_status)


@click.command(epilog=examples("collect", "collect toy-2026", "collect --config cluster.yml"))
@with_options(*RUN, JSON)
@click.pass_context
def collect(ctx: click.Context, **values: Any) -> None:
    """Bring a run's logs, metrics, checkpoint and output here.

    RUN is a run's id, a part of one, or its folder; by default the newest. Of a run that still goes on,
    what there is by now. What is here already is not fetched again. Exit status: the run's; 0 while it goes on, 1
    when nodes out of reach keep how it ended.
    """
    from launcher.manage.collect_run import collect_run, folder_for

    console, as_json = _console(ctx, values)
    with _open(ctx, values, _is_over_here) as run:
        if _is_over_here(run.found):
            ctx.exit(_show_over(run.found, console, as_json))
        brought = collect_run(run, folder_for(run, _choice(ctx, values).runs_dirs[0]))
        if brought.report is not None:
            _leave_serving(run.found, console)
    _tell_brought(brought, console)
    if as_json:
        echo_json(brought.to_json())
    ctx.exit(brought.exit_status)


@click.command(epilog=examples("runs", "runs -n 5", "runs --json"))
@click.option("--runs-dir", metavar="DIR", help="Folder on this machine with runs; default: runs.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.option("-n", "last", type=click.IntRange(1), metavar="N", help="Only the newest N.")
@click.pass_context
def runs(ctx: click.Context, last: int | None, **values: Any) -> None:
    """What has been run: when, on what, and what came of it."""
    from launcher.report.run_history import history, rendered, to_json

    console, as_json = _console(ctx, values)
    entries = history(_choice(ctx, values).runs_dirs, last)
    if as_json:
        click.echo(to_json(entries))
    elif entries:
        console.print(rendered(entries))
    else:
        console.print("no run is known on this machine")


@click.command(
    epilog=examples(
        "resume toy-2026",
        "resume toy-2026 --epochs 40 --detach",
        "resume toy-2026 --exclude gnn3",
        "resume mine -- python a.py",
    )
)
@with_options(click.argument("run", shell_complete=run_ids), *RUN[1:], JSON, SET, *HOST_FILTERS)
@click.option("--epochs", metavar="N", help="Passes over the train seeds in all, those before included.")
@click.option("--master-addr", metavar="ADDR", help="Address of the first node that trains, as the others see it.")
@click.option("--run-id", metavar="ID", help="Name of the new run; default: made from name and time.")
@with_options(DETACH, *LIVE)
@click.pass_context
def resume(
    ctx: click.Context,
    sets: tuple[str, ...],
    epochs: str | None,
    master_addr: str | None,
    on_interrupt: str | None,
    **values: Any,
) -> None:
    """Launch a run again, from its newest checkpoint.

    RUN is a run's id, a part of one, or its folder. Config and own command are the same, but for what these options
    change. A host that was lost is left out with --exclude, now and when the new run is resumed.
    """
    from launcher.manage.resume import go_to, needs_no_node, prepare
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
    )
    with _open(ctx, values, needs_no_node) as run:
        again = prepare(run, _choice(ctx, values).runs_dirs[0], asked)
    for text in (*again.notes, again.told):
        console.print(text, soft_wrap=True, markup=False)
    config = read_config(again.options)
    go_to(again.cwd)
    report = launch(config, again.options, console, attach_of(config, again.options.config, console))
    if as_json:
        click.echo(json.dumps({"kind": "report", **report.to_json()}))
    ctx.exit(report.exit_status)


COMMANDS = (status, logs, profile, follow, attach, stop, collect, runs, resume)


def register_commands(group: click.Group) -> None:
    """Make them commands of ``group``."""
    for command in COMMANDS:
        group.add_command(command)


def _choice(ctx: click.Context, values: Mapping[str, Any]) -> Choice:
    """Which run; options before the command count too."""
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
    """Where to print, and whether stdout is for JSON."""
    as_json = bool(values.get("as_json") or (ctx.obj or {}).get("as_json"))
    return console_of(as_json), as_json


def _is_over_here(found: FoundRun) -> bool:
    """Whether nothing of the run is anywhere but here: its end is known, or nothing has ever started."""
    from launcher.report.verdict import known_without_nodes

    return known_without_nodes(found)


def _show_over(found: FoundRun, console: Console, as_json: bool) -> int:
    """Say how such a run ended."""
    from launcher.manage.status import Status, rendered
    from launcher.report.verdict import from_here

    told = Status(found, from_here(found), {})
    if as_json:
        echo_json(told.to_json())
    else:
        console.print(rendered(told), soft_wrap=True)
    return int((found.result or {}).get("exit_status", told.verdict.exit_status))


def _leave_serving(found: FoundRun, console: Console) -> None:
    """Of a run that has ended: the key that let it into a serving cluster."""
    from launcher.serving.attach_run import leave

    for note in leave(found):
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)


def _tell_brought(brought: CollectResult, console: Console) -> None:
    from launcher.report.report import print_report

    if brought.report is not None:
        print_report(brought.report, console)
        return
    console.print(brought.told, soft_wrap=True, markup=False)
    for note in brought.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)
