"""``gnnfleet report`` and ``gnnfleet compare``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from launcher.cli.completion import run_ids
from launcher.cli.options import RUN, GroupedOptions, OutputFile, console_of, echo_json, examples, with_options
from launcher.text import say


@click.command(cls=GroupedOptions, epilog=examples("report toy-2026", "report toy-2026 --watch"))
@RUN[0]
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="File to write; default: RUN/report.html.")
@click.option("--watch", is_flag=True, help="Serve a live page on localhost until Ctrl-C.")
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port for --watch; default: a free one.")
@with_options(*RUN[1:])
@click.pass_context
def report(
    ctx: click.Context,
    run: str | None,
    output: Path | None,
    watch: bool,
    port: int | None,
    config: Path | None,
    runs_dir: str | None,
) -> None:
    """Write a run's curves, times and errors to one HTML file.

    RUN is a run id, a part of one, or a run folder; default: the newest that is alive, else the newest. Of a run that
    is still running, the files written so far are collected first. The HTML file needs no network. It is also written
    at the end of each run.
    """
    from launcher.manage.collect_run import folder_for
    from launcher.manage.select import Choice, chosen
    from launcher.report.verdict import known_without_nodes

    if watch and output:
        raise click.UsageError("give --watch or -o, not both: --watch writes no file", ctx)
    if port and not watch:
        raise click.UsageError("--port is for --watch", ctx)
    before = ctx.obj or {}
    folders = runs_dir or before.get("runs_dir")
    choice = Choice(run, config or before.get("config"), tuple(before.get("sets") or ()), folders)
    with chosen(choice, offline=known_without_nodes) as opened:
        folder = folder_for(opened, choice.runs_dirs[0])
        if watch:
            from launcher.manage.watch_report import watch_report

            watch_report(opened, folder, port=port, runs_dirs=choice.runs_dirs)
        else:
            from launcher.manage.collect_run import collect_run
            from launcher.report.html.render import write_html
            from launcher.report.verdict import known_without_nodes

            idle = 0.0
            if not known_without_nodes(opened.found):
                collected = collect_run(opened, folder)
                idle = collected.idle
                for text in filter(None, (collected.message, *collected.notes)):
                    say(text, "yellow")
            click.echo(str(write_html(folder, output, runs_dirs=choice.runs_dirs, idle=idle)))


@click.command(cls=GroupedOptions, epilog=examples("compare toy-2026 toy-lr"))
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", shell_complete=run_ids)
@click.option("--runs-dir", metavar="DIR", help="Local folder of runs; default: runs.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")
@click.pass_context
def compare(ctx: click.Context, runs: tuple[str, ...], runs_dir: str | None, as_json: bool) -> None:
    """Compare runs: differing settings, results, speed and versions.

    RUN is a run id, a part of one, or a run folder. Only files on this machine are read, so collect a run that is still
    running first. The best values are marked.
    """
    from launcher.report.compare import compare as side_by_side
    from launcher.report.compare import figures_of, print_comparison
    from launcher.report.run_history import find_run

    before = ctx.obj or {}
    folders = [Path(os.path.expanduser(runs_dir or before.get("runs_dir") or "runs"))]
    found = [find_run(run, folders) for run in runs]
    if len({one.folder.resolve() for one in found if one.folder}) < len(runs) or len(runs) < 2:
        raise click.UsageError("give two or more different runs; `gnnfleet runs` lists those known here", ctx)
    comparison = side_by_side([figures_of(one, folders) for one in found])
    if as_json or before.get("as_json"):
        echo_json(comparison.to_json())
    else:
        print_comparison(comparison, console_of(False))
