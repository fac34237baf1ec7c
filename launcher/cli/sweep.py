"""``gnnfleet sweep``: tries several values of config keys, one run each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from launcher.cli.completion import sweep_names
from launcher.cli.launch_compat import joined
from launcher.cli.options import (
    CONFIG,
    HOST_FILTERS,
    JSON,
    SET,
    GroupedOptions,
    console_of,
    echo_json,
    examples,
    with_options,
)

_EPILOG = (
    "Exit status: 0 all trials have ended and none failed by itself; 1 some failed, or none has a result; 2 bad usage "
    "or config; 3 too few hosts are left, or no trial could be started; 130 interrupted.\n\n"
    + examples(
        "sweep -c cluster.yml --set train.lr=1e-3,1e-2 --nodes-per-run 2",
        "sweep -c cluster.yml --set train.lr=1e-4..1e-1,log --trials 40",
        "sweep --resume NAME",
    )
)


@click.command(cls=GroupedOptions, epilog=_EPILOG, short_help="Try several values of config keys, side by side.")
@with_options(CONFIG, SET, *HOST_FILTERS)
@click.option("--nodes-per-run", type=click.IntRange(1), metavar="N", help="Nodes of each trial; default: all.")
@click.option("--trials", type=click.IntRange(1), metavar="N", help="Number of trials of a search.")
@click.option("--search", type=click.Choice(["grid", "random", "tpe"]), metavar="HOW",
              help="grid (default), random or tpe (default with --trials).")  # fmt: skip
@click.option("--pruner", type=click.Choice(["none", "median", "hyperband"]), metavar="HOW",
              help="median (default of a search), hyperband or none.")  # fmt: skip
@click.option("--metric", default="", metavar="NAME", help="As val_macro_f1; default: the task's metric on val.")
@click.option("--goal", type=click.Choice(["max", "min"]), metavar="HOW", help="max or min, for other metrics.")
@click.option("--wait", is_flag=True, help="Trials wait in line for devices and hosts that other runs use.")
@click.option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Of the search; default: 0.")
@click.option("--epochs", metavar="N", help="Passes over the train seeds.")
@click.option("--name", metavar="NAME", help="Name of the sweep; default: `name` in the file.")
@click.option(
    "--resume", "resumed", metavar="NAME", shell_complete=sweep_names, help="Continue a sweep, by name or folder."
)
@click.option("--runs-dir", metavar="DIR", help="Local folder of runs; sweeps/ is beside it.")
@with_options(JSON)
@click.option("--plain", is_flag=True, help="Print lines instead of the live table.")
@click.pass_context
def sweep(
    ctx: click.Context, sets: tuple[str, ...], include: tuple[str, ...], exclude: tuple[str, ...], resumed: str | None,
    config: Path | None, runs_dir: str | None, epochs: str | None, as_json: bool, plain: bool, goal: str | None,
    **values: Any,
) -> None:  # fmt: skip
    """Try several values of config keys: one run for each, side by side on disjoint hosts, and one after another.

    --set KEY=V1,V2 lists values, --set KEY=LOW..HIGH[,log] is a range for a search; a list is one value in brackets.
    The same command, or --resume, continues a sweep that was ended. Words after -- are your own command.
    """
    from launcher.run.config_of_options import overrides_of
    from launcher.run.options import LaunchOptions
    from launcher.sweep.finish import exit_status, finish
    from launcher.sweep.records import chosen_folder
    from launcher.sweep.sweep import Sweep, SweepOptions, define

    before: dict[str, Any] = ctx.obj or {}
    config, runs_dir = config or before.get("config"), runs_dir or before.get("runs_dir")
    epochs = epochs or before.get("epochs")
    sets, include, exclude = (
        joined(before, name, words) for name, words in (("sets", sets), ("include", include), ("exclude", exclude))
    )
    as_json, plain = as_json or bool(before.get("as_json")), plain or bool(before.get("plain"))
    console = console_of(as_json)
    if resumed is not None:
        if config or sets or include or exclude or epochs or any(values.values()):
            raise click.UsageError("--resume continues a sweep as it was begun; leave the other options out", ctx)
        folder = chosen_folder(resumed, [Path(os.path.expanduser(runs_dir or "runs")).absolute().parent / "sweeps"])
        definition = folder.definition()
    else:
        if config is None:
            raise click.UsageError("give the cluster file: --config cluster.yml (`gnnfleet init` writes one)", ctx)
        launch = LaunchOptions(
            config, overrides_of({"epochs": epochs, "runs_dir": runs_dir}, ()), include, exclude,
            own_command=ctx.meta.get("own_command", ()), as_json=as_json, plain=plain,
        )  # fmt: skip
        definition, folder = define(SweepOptions(launch, sets, goal=goal or "", **values))  # type: ignore[arg-type]
    with folder.held():
        folder.define(definition)
        made = Sweep(folder, definition, console, plain=plain)
        why = made.run()
        result = finish(made, why, console)
    if as_json:
        echo_json(result)
    ctx.exit(exit_status(made, why))
