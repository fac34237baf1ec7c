"""``gnnfleet rehearse``: runs the plan of a cluster on this machine, on a smaller graph, optionally with a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.cli.launch_compat import options_of
from launcher.cli.options import GroupedOptions, console_of, examples

_EPILOG = "Exit status: that of the run; 1 if it ended before the step of --fault.\n\n" + examples(
    "rehearse --config cluster.yml --fault rank1:kill@step20"
)

_FOLDER = Path("~/gnnfleet-work/rehearsal")

#: Parameters in the order of the help; the other options of a launch are accepted, too.
_SHOWN = (
    *("config", "sets", "fault", "vertices", "folder", "plain", "include", "exclude"),
    *("dataset", "epochs", "batch_size", "run_id", "runs_dir", "as_json"),
)


@click.command(cls=GroupedOptions, epilog=_EPILOG, short_help="Run the same plan on this machine, also with a fault.")
@click.option("--fault", metavar="FAULT", help="rankR or serverK, :kill or :freeze, @stepN.")
@click.option(
    "--vertices",
    type=click.IntRange(100),
    default=20_000,
    metavar="N",
    help="Most vertices of the graph; default: 20000.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=_FOLDER,
    metavar="DIR",
    help=f"Parts and work folders; default: {_FOLDER}.",
)
@click.option("--plain", is_flag=True, help="Print prefixed lines instead of the live view.")
@click.pass_context
def _rehearse(
    ctx: click.Context, fault: str | None, vertices: int, folder: Path, **values: Any
) -> None:  # fmt: skip
    """Run the plan of a cluster on this machine, on the CPU, with a smaller graph.

    Nodes, roles, ranks, settings and your own command after -- are those of the real run. No host is contacted.
    --fault kills or freezes a process after N training steps, to show what the report of such a failure says.
    """
    from launcher.rehearse.faults import Fault
    from launcher.rehearse.rehearse import rehearse

    wanted = Fault.parse(fault) if fault is not None else None
    options = options_of(ctx, values)
    report = rehearse(options, folder, vertices, wanted, console_of(options.as_json))
    if options.as_json:
        import json

        click.echo(json.dumps({"kind": "report", **report.to_json()}))
    ctx.exit(report.exit_status)


def rehearse_command(config_options: Callable[[click.Command], click.Command]) -> click.Command:
    """Return the click command ``gnnfleet rehearse``. It accepts all launch options; its help lists the main ones."""
    command = config_options(_rehearse)
    command.name = "rehearse"
    for option in command.params:
        if isinstance(option, click.Option):
            option.hidden = option.name not in _SHOWN
    command.params.sort(key=lambda param: _SHOWN.index(param.name) if param.name in _SHOWN else len(_SHOWN))
    return command
