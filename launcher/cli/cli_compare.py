"""``gnnfleet compare``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from launcher.cli.completing import run_ids

_EPILOG = """\b
Example:
  gnnfleet compare toy-2026 toy-lr
  gnnfleet compare runs/a runs/b runs/c --json"""


@click.command(epilog=_EPILOG)
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", shell_complete=run_ids)
@click.option("--runs-dir", metavar="DIR", help="Folder on this machine with runs; default: runs.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
def compare(ctx: click.Context, runs: tuple[str, ...], runs_dir: str | None, as_json: bool) -> None:
    """Put runs side by side: settings that differ, results, speed, versions.

    RUN is a run's id, a part of one, or its folder. Figures are of what is here: collect a run first
    that still goes on. The best values are marked.
    """
    from launcher.consoles import console_for
    from launcher.report.compare import compare as side_by_side
    from launcher.report.compare import figures_of
    from launcher.report.compare_table import print_comparison
    from launcher.report.found import find_run

    before = ctx.obj or {}
    places = [Path(runs_dir or before.get("runs_dir") or "runs").expanduser()]
    found = [find_run(run, places) for run in runs]
    if len({one.folder.resolve() for one in found if one.folder}) < len(runs) or len(runs) < 2:
        raise click.UsageError("give two different runs or more; `gnnfleet runs` lists those known here", ctx)
    comparison = side_by_side([figures_of(one) for one in found])
    if as_json or before.get("as_json"):
        click.echo(json.dumps(comparison.to_json(), indent=1))
    else:
        print_comparison(comparison, console_for(stderr=False))
