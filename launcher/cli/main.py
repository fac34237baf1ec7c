"""The ``gnnfleet`` command (also ``launch.py``): launch, plan, check, partition."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from launcher.cli.completion import runs_or_files, serving_names
from launcher.cli.launch_compat import _options, _repeated, foreign_options, import_command, without_remote
from launcher.cli.options import (
    CONFIG,
    DETACH,
    DRY_RUN,
    HOST_FILTERS,
    JSON,
    LIVE,
    SET,
    VERBOSE,
    F,
    console_of,
    examples,
    show,
    with_options,
)
from launcher.errors import FleetError, Interrupted
from launcher.run.options import LaunchOptions, choose_run_id, read_config

_EPILOG = """\b
Examples:
  gnnfleet init gnn1 gnn2 -o cluster.yml
  gnnfleet --config cluster.yml --epochs 3 --set train.lr=0.01
  gnnfleet --config cluster.yml --detach -- python train_mine.py --lr 0.01

In a checkout, gnnfleet is `python launch.py`. COMMAND --help tells more, docs/operating.md the rest.

\b
Exit status: 0 done, or detached; 1 failed, or the highest status of failed processes;
2 bad usage or config, 3 preflight refused, 130 interrupted or stopped."""

#: Options that the help of the program shows.
_MOST_USED = ("config", "sets", "detach", "dry_run", "help")

#: Commands in the order one needs them; others follow.
_ORDER = (
    *("init", "import", "check", "plan", "launch", "partition"),
    *("status", "logs", "follow", "attach", "stop", "collect", "resume"),
    *("runs", "profile", "report", "compare", "serve", "completion"),
)


class OwnCommandGroup(click.Group):
    """Keeps everything after ``--`` away from click: it is the user's own command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if "own_command" in ctx.meta:
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those that most launches have; the whole list is the help of ``launch``."""
        shown = [param.get_help_record(ctx) for param in self.get_params(ctx) if param.name in _MOST_USED]
        with formatter.section("Options (launch --help has all)"):
            formatter.write_dl([record for record in shown if record])
        self.format_commands(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        if "--" in words and "partition" not in words[: words.index("--")]:
            split = words.index("--")
            ctx.meta["own_command"] = tuple(words[split + 1 :])
            if not ctx.meta["own_command"] and not ctx.resilient_parsing:
                raise click.UsageError("give your own command after --, e.g. -- python train_mine.py", ctx)
            words = words[:split]
        return super().parse_args(ctx, without_remote(ctx, words))


def config_options(command: F) -> F:
    """Options of everything that reads a config."""
    given = (
        CONFIG,
        SET,
        *HOST_FILTERS,
        click.option("--epochs", metavar="N", help="Passes over the train seeds."),
        click.option("--batch-size", metavar="N", help="Global batch: seeds per step over all processes."),
        click.option("--num-neighbors", metavar="15,10,5", help="Neighbours per hop, seeds outward."),
        click.option("--num-training-procs", type=click.IntRange(1), metavar="N", help="Processes on every node."),
        click.option(
            "--master-addr", metavar="ADDR", help="Address of the first node that trains, as the others see it."
        ),
        click.option("--master-port", metavar="PORT", help="Port for torch.distributed on the first node that trains."),
        click.option(
            "--resume",
            metavar="FILE|RUN",
            shell_complete=runs_or_files,
            help="Go on from a checkpoint, or from an earlier run.",
        ),
        click.option(
            "--serving",
            metavar="NAME",
            shell_complete=serving_names,
            help="Train on the graph of a serving cluster (gnnfleet serve).",
        ),
        click.option("--runs-dir", metavar="DIR", help="Folder on this machine for logs and results."),
        click.option("--name", metavar="NAME", help="Begins the run id; default: `name` of the file."),
        click.option("--run-id", metavar="ID", help="Name of this run; default: made from name and time."),
        JSON,
        VERBOSE,
    )
    return with_options(*given)(foreign_options(command))


class PartitionCommand(click.Command):
    """Its help is shown for ``partition --help``; ``partition make --help`` is the trainer's to answer."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] in ([], ["--help"], ["-h"]) and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit(0 if args else 2)
        return super().parse_args(ctx, args)


_CONTEXT = {"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]}

launch_options = with_options(DETACH, *LIVE, DRY_RUN)


@click.group(
    cls=OwnCommandGroup,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={**_CONTEXT, "max_content_width": 110},
)
@config_options
@launch_options
@click.pass_context
def gnnfleet(ctx: click.Context, dry_run: bool, **values: Any) -> None:
    """Turn SSH hosts into one training cluster for graph neural networks.

    With --config and no command: launch. Words after -- are your own training command, run instead of the
    bundled trainer. Options may be written with underscores or dashes.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = values
        return
    if values["config"] is None and not any(values.values()) and not dry_run:
        click.echo(ctx.get_help())
        ctx.exit(2)
    (show_plan if dry_run else run_launch)(_options(ctx, values))


@gnnfleet.command(epilog=examples("launch --config cluster.yml --epochs 3"))
@config_options
@launch_options
@click.pass_context
def launch(ctx: click.Context, dry_run: bool, **values: Any) -> None:
    """Launch (what --config alone does)."""
    (show_plan if dry_run else run_launch)(_options(ctx, values))


@gnnfleet.command(epilog=examples("plan --config cluster.yml --set train.lr=0.01"))
@config_options
@click.pass_context
def plan(ctx: click.Context, **values: Any) -> None:
    """Show what a launch would send, run and move (--dry-run)."""
    show_plan(_options(ctx, values))


@gnnfleet.command(epilog=examples("check --config cluster.yml"))
@config_options
@click.pass_context
def check(ctx: click.Context, **values: Any) -> None:
    """Preflight alone: connect, check every node, list what is wrong."""
    from launcher.run.launch import run_check

    options = _options(ctx, values)
    ctx.exit(run_check(read_config(options), options, console_of(options.as_json)))


gnnfleet.add_command(import_command(config_options))


@gnnfleet.command(
    cls=PartitionCommand,
    context_settings={**_CONTEXT, "ignore_unknown_options": True, "help_option_names": []},
    epilog=examples(
        "partition make --config cluster.yml",
        "partition inspect --config cluster.yml",
        "partition verify parts/",
    ),
    short_help="Divide a graph (make), check its parts (verify, inspect).",
)
@click.argument("what", type=click.Choice(["make", "verify", "inspect"]))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@with_options(CONFIG, SET, *HOST_FILTERS)
@click.pass_context
def partition(
    ctx: click.Context,
    what: str,
    words: Sequence[str],
    config: Path | None,
    sets: Sequence[str],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> None:
    """Divide a graph, check a partition folder, or describe it.

    With --config the graph and folder come from the file; other words go to
    `python -m trainer partition`, whose own help is `partition make --help`.
    """
    from launcher.plan.partition import partition_words, run_trainer

    before: dict[str, Any] = ctx.obj or {}
    config = config or before.get("config")
    sets, include, exclude = (
        _repeated(before, name, words) for name, words in (("sets", sets), ("include", include), ("exclude", exclude))
    )
    cluster = read_config(LaunchOptions(config, sets, include, exclude)) if config else None
    ctx.exit(run_trainer(partition_words(what, cluster, words)))


def show_plan(options: LaunchOptions) -> None:
    """Print the plan of a launch; opens no connection."""
    from launcher.config.resolve import resolve_run
    from launcher.plan.build import offline_plan
    from launcher.serving.attach_run import known_serving

    config = read_config(options)
    run_id = choose_run_id(config, options.run_id)
    made = offline_plan(resolve_run(config), run_id, options.own_command, serving=known_serving(config), to_train=True)
    show(made, as_json=options.as_json, verbose=options.verbose)


def run_launch(options: LaunchOptions) -> NoReturn:
    """Launch, follow, report; exits with the run's status. With --json one event a line, the report last."""
    import json

    from launcher.run.launch import launch as launch_run
    from launcher.serving.attach_run import attach_of

    config, console = read_config(options), console_of(options.as_json)
    report = launch_run(config, options, console, attach_of(config, options.config, console))
    if options.as_json:
        click.echo(json.dumps({"kind": "report", **report.to_json()}))
    raise click.exceptions.Exit(report.exit_status)


def run(argv: Sequence[str] | None = None, prog_name: str = "gnnfleet") -> int:
    """The program; returns its exit status. Errors a user can act on are one message on stderr."""
    from launcher.cli.completion import completion
    from launcher.cli.init import init
    from launcher.cli.report import compare, report
    from launcher.cli.runs import register_commands
    from launcher.cli.serve import serve

    register_commands(gnnfleet)
    gnnfleet.add_command(report)
    gnnfleet.add_command(compare)
    gnnfleet.add_command(serve)
    gnnfleet.add_command(completion)
    gnnfleet.add_command(init)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(gnnfleet.main(words, prog_name=prog_name, standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return _told(words, error.format_message(), 2)
    except Interrupted as error:
        click.secho(str(error), fg="yellow", err=True)
        return _told(words, str(error), error.exit_status)
    except FleetError as error:
        click.secho(f"error: {error}", fg="red", err=True)
        return _told(words, str(error), error.exit_status)
    except (KeyboardInterrupt, click.Abort):
        click.secho("interrupted", fg="yellow", err=True)
        return 130
    except BrokenPipeError:  # the reader of our output (`| head`) has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:  # a full or read-only disk, a file that may not be read
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        click.secho(f"error: {message}", fg="red", err=True)
        return _told(words, message, 1)


def _told(words: Sequence[str], message: str, exit_status: int) -> int:
    """With --json, an error is JSON on stdout as well."""
    if "--json" in words[: words.index("--") if "--" in words else None]:
        import json

        click.echo(json.dumps({"kind": "error", "message": message, "exit_status": exit_status}))
    return exit_status


def main(prog_name: str = "gnnfleet") -> NoReturn:
    """Console script and ``launch.py``."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # else nohup has it ignored
            signal.signal(number, _ended_by)
    sys.exit(run(prog_name=prog_name))


def _ended_by(number: int, frame: FrameType | None) -> NoReturn:
    """The terminal is as it was before: a hidden cursor is shown, a password prompt gives back the echo."""
    raise SystemExit(128 + number)
