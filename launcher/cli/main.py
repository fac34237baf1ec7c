"""The ``gnnfleet`` program (also ``launch.py``), with its commands launch, plan, check and partition."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from launcher import __version__
from launcher.cli.completion import runs_or_files, serving_names
from launcher.cli.export import export_command
from launcher.cli.launch_compat import foreign_options, import_command, joined, options_of, without_remote
from launcher.cli.options import (
    CONFIG,
    DETACH,
    DRY_RUN,
    HOST_FILTERS,
    JSON,
    LIVE,
    SET,
    VERBOSE,
    WAIT,
    F,
    GroupedOptions,
    console_of,
    examples,
    show,
    with_options,
)
from launcher.cli.partition_store import STORE_COMMANDS
from launcher.cli.rehearse import rehearse_command
from launcher.errors import FleetError, Interrupted, UsageError
from launcher.run.config_of_options import read_config
from launcher.run.options import LaunchOptions, choose_run_id
from launcher.text import say

_EPILOG = """\b
Examples:
  gnnfleet init gnn1 gnn2 -o cluster.yml
  gnnfleet --config cluster.yml --epochs 3 --set train.lr=0.01"""

#: Options that `gnnfleet --help` lists.
_MOST_USED = ("config", "version", "help")

#: Commands in the order in which a user needs them; commands not listed here follow.
_ORDER = (
    *("init", "setup", "import", "hosts", "check", "plan", "rehearse", "launch", "sweep", "export", "partition"),
    *("status", "queue", "logs", "follow", "attach", "stop", "collect", "resume"),
    *("infer", "inspect", "runs", "profile", "report", "compare", "serve", "clean", "completion"),
)


class _OwnCommandGroup(click.Group):
    """A click group that stores the words after ``--``, the user's own command, in ``ctx.meta["own_command"]``."""

    command_class = GroupedOptions

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if "own_command" in ctx.meta:
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the most used options into the help text of ``gnnfleet``; ``launch --help`` lists all."""
        shown = [param.get_help_record(ctx) for param in self.get_params(ctx) if param.name in _MOST_USED]
        with formatter.section("Options (all of them, and exit statuses: gnnfleet launch --help)"):
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
    """Decorator that adds the options of commands that read a config."""
    given = (
        CONFIG,
        SET,
        *HOST_FILTERS,
        click.option("--epochs", metavar="N", help="Passes over the train seeds."),
        click.option("--batch-size", metavar="N", help="Seeds per step over all processes."),
        click.option("--num-neighbors", metavar="15,10,5", help="Neighbours per hop, first hop first."),
        click.option("--num-training-procs", type=click.IntRange(1), metavar="N", help="Processes per node."),
        click.option("--master-addr", metavar="ADDR", help="Address at which nodes reach the lead node."),
        click.option("--master-port", metavar="PORT", help="Port for torch.distributed on the lead node."),
        click.option(
            "--resume",
            metavar="FILE|RUN",
            shell_complete=runs_or_files,
            help="Continue from a checkpoint or an earlier run.",
        ),
        click.option(
            "--serving",
            metavar="NAME",
            shell_complete=serving_names,
            help="Use the graph of this serving cluster.",
        ),
        click.option("--name", metavar="NAME", help="Prefix of the run id; default: `name` in the file."),
        click.option("--run-id", metavar="ID", help="Id of the run; default: from name and time."),
        click.option("--runs-dir", metavar="DIR", help="Local folder for logs and results."),
        JSON,
        VERBOSE,
    )
    return with_options(*given)(foreign_options(command))


class _PartitionCommand(GroupedOptions):
    """A command that handles ``partition --help`` itself and passes ``partition make --help`` on to the trainer."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] in ([], ["--help"], ["-h"]) and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit(0 if args else 2)
        return super().parse_args(ctx, args)


_TRAINER_ACTIONS = ("make", "convert", "repartition", "verify", "inspect", "tables")

_CONTEXT = {"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]}

launch_options = with_options(
    click.option("--slurm", metavar="KEY=VALUE,…", help="Submit a Slurm job: partition=gpu,nodes=4,time=2:00:00."),
    click.option("--nodes-needed", metavar="N[-M]", help="Only so many of them: the first that are free."),
    WAIT,
    DETACH,
    *LIVE,
    DRY_RUN,
    click.option("--resumed-from", metavar="RUN", hidden=True),  # set in the batch script of a resumed run
)


@click.group(
    cls=_OwnCommandGroup,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={**_CONTEXT, "max_content_width": 110},
)
@config_options
@launch_options
@click.version_option(__version__, message="gnnfleet %(version)s", help="Show the version and exit.")
@click.pass_context
def gnnfleet(ctx: click.Context, dry_run: bool, **values: Any) -> None:
    """Train graph neural networks on several hosts. --config FILE launches a run."""
    if ctx.invoked_subcommand is not None:
        ctx.obj = values
        return
    if values["config"] is None and not any(values.values()) and not dry_run:
        click.echo(ctx.get_help())
        ctx.exit(2)
    (show_plan if dry_run else run_launch)(options_of(ctx, values))


@gnnfleet.command(
    epilog="Exit status: 0 done or detached; 1 failed, or the highest status of the failed processes; 2 bad usage or "
    "config; 3 preflight refused; 130 stopped.\n\n" + examples("launch --config cluster.yml --epochs 3"),
    short_help="Launch a run (the default with --config).",
)
@config_options
@launch_options
@click.pass_context
def launch(ctx: click.Context, dry_run: bool, **values: Any) -> None:
    """Launch a run: check the hosts, send code and parts, train, report.

    `gnnfleet --config FILE` does the same. Words after -- are your own command.
    """
    (show_plan if dry_run else run_launch)(options_of(ctx, values))


@gnnfleet.command(epilog=examples("plan --config cluster.yml --set train.lr=0.01"))
@config_options
@click.pass_context
def plan(ctx: click.Context, **values: Any) -> None:
    """Show what a launch would send and run (same as --dry-run)."""
    show_plan(options_of(ctx, values))


@gnnfleet.command(epilog=examples("check --config cluster.yml"))
@config_options
@click.option("--notify", is_flag=True, help="Send a test message to run.notify.")
@click.option("--speed", is_flag=True, help="Measure the hosts, too; takes two seconds.")
@click.pass_context
def check(ctx: click.Context, notify: bool, speed: bool, **values: Any) -> None:
    """Run preflight only: check every node. Neither graph nor script is run."""
    from launcher.run.check import run_check

    options = options_of(ctx, values)
    ctx.exit(run_check(read_config(options), options, console_of(options.as_json), notify=notify, speed=speed))


for _param in check.params:
    if isinstance(_param, click.Option) and _param.name == "verbose":
        _param.hidden = True  # accepted, but check prints no plan

gnnfleet.add_command(import_command(config_options))
gnnfleet.add_command(export_command(config_options))
gnnfleet.add_command(rehearse_command(config_options))


@gnnfleet.command(
    cls=_PartitionCommand,
    context_settings={**_CONTEXT, "ignore_unknown_options": True, "help_option_names": []},
    epilog=examples(
        "partition make --config cluster.yml",
        "partition inspect --config cluster.yml",
        "partition verify parts/",
        "partition convert ogbn-products-partitions parts",
        "partition repartition parts parts-8 --num-parts 8",
        "partition tables shop/",
        "partition push parts s3://bucket/products",
    ),
    short_help="Cut a graph into parts; convert, check or upload parts.",
)
@click.argument("what", type=click.Choice([*_TRAINER_ACTIONS, *STORE_COMMANDS]))
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
    """Cut a graph into parts, and work with parts.

    make cuts a graph into parts. convert reads the parts of torch_geometric, GLT or DGL. repartition changes the
    number of parts. verify checks a folder of parts, inspect describes it. tables drafts the section `data` for
    tables. push uploads parts to an object store, fetch downloads them.

    With --config the graph and the folder come from the file. Other words are passed to
    `python -m trainer partition`; `partition make --help` shows its options.
    """
    from launcher.plan.partition import partition_command, run_trainer

    before: dict[str, Any] = ctx.obj or {}
    config = config or before.get("config")
    sets, include, exclude = (
        joined(before, name, words) for name, words in (("sets", sets), ("include", include), ("exclude", exclude))
    )
    cluster = read_config(LaunchOptions(config, sets, include, exclude)) if config else None
    if command := STORE_COMMANDS.get(what):
        command.main([*words], f"gnnfleet partition {what}", standalone_mode=False, obj=cluster)
        ctx.exit(0)
    ctx.exit(run_trainer(partition_command(what, cluster, words)))


def show_plan(options: LaunchOptions) -> None:
    from launcher.config.resolve import resolve_run
    from launcher.manage.submit import in_queue, script_of
    from launcher.plan.build import offline_plan
    from launcher.serving.attach_run import known_serving

    if options.nodes_needed:
        raise UsageError("--nodes-needed chooses among hosts that it has checked, which a plan does not; use --include")
    config = read_config(options)
    run_id = choose_run_id(config, options.run_id)
    made = offline_plan(resolve_run(config), run_id, options.own_command, serving=known_serving(config), to_train=True)
    show(made, as_json=options.as_json, verbose=options.verbose)
    if in_queue(config) and not options.as_json:
        click.echo(f"\nbatch script:\n{script_of(config, options, run_id)}")


def run_launch(options: LaunchOptions) -> NoReturn:
    """Launch, follow and report a run; exit with its status. --json prints one event per line and the report last."""
    import json

    from launcher.manage.submit import in_queue, resumed_after_requeue, submit_and_follow
    from launcher.run.launch import launch as launch_run
    from launcher.serving.attach_run import attach_of

    config, console = read_config(options), console_of(options.as_json)
    if in_queue(config):
        raise click.exceptions.Exit(submit_and_follow(config, options, console))
    options, message = resumed_after_requeue(config, options, os.environ)
    if message:
        console.print(message, soft_wrap=True, markup=False)
        config = read_config(options)
    report = launch_run(config, options, console, attach_of(config, options.config, console))
    if options.as_json:
        click.echo(json.dumps({"kind": "report", **report.to_json()}))
    raise click.exceptions.Exit(report.exit_status)


def with_all_commands() -> click.Group:
    """Import the modules of all commands and add the commands to ``gnnfleet``."""
    from launcher.cli.completion import completion
    from launcher.cli.explain import explain
    from launcher.cli.hosts import clean, hosts, queue
    from launcher.cli.infer import infer, inspect
    from launcher.cli.init import init
    from launcher.cli.report import compare, report
    from launcher.cli.runs import register_commands
    from launcher.cli.serve import serve
    from launcher.cli.setup import setup
    from launcher.cli.sweep import sweep

    register_commands(gnnfleet)
    for command in (
        infer,
        inspect,
        report,
        compare,
        serve,
        queue,
        completion,
        init,
        setup,
        sweep,
        explain,
        clean,
        hosts,
    ):
        gnnfleet.add_command(command)
    return gnnfleet


def run(argv: Sequence[str] | None = None, prog_name: str = "gnnfleet") -> int:
    """Run the program and return its exit status. Prints errors that a user can act on to stderr, without traceback."""
    from launcher.report.explain import hint

    with_all_commands()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(gnnfleet.main(words, prog_name=prog_name, standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        written = io.StringIO()  # click folds nothing but its usage line
        error.show(written)
        say(written.getvalue().rstrip("\n"))
        return _json_error(words, error.format_message(), 2)
    except Interrupted as error:
        say(str(error), "yellow")
        return _json_error(words, str(error), error.exit_status)
    except FleetError as error:
        return _show_error(words, str(error), error.exit_status, hint([error.code]))
    except (KeyboardInterrupt, click.Abort):
        say("interrupted", "yellow")
        return 130
    except BrokenPipeError:  # the reader of stdout, as `| head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:  # a full or read-only disk, a file without read permission
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _show_error(words, message, 1)


def _show_error(words: Sequence[str], message: str, exit_status: int, more: str = "") -> int:
    from rich.text import Text

    console = console_of(as_json=True)  # on stderr
    console.print(Text(f"error: {message}", "red"), soft_wrap=True)
    if more:
        console.print(Text(more, "dim"), soft_wrap=True)
    return _json_error(words, message, exit_status)


def _json_error(words: Sequence[str], message: str, exit_status: int) -> int:
    """Print an error as JSON on stdout if the command line ``words`` has --json; return ``exit_status``."""
    if "--json" in words[: words.index("--") if "--" in words else None]:
        import json

        click.echo(json.dumps({"kind": "error", "message": message, "exit_status": exit_status}))
    return exit_status


def main(prog_name: str = "gnnfleet") -> NoReturn:
    """Entry point of the console script and of ``launch.py``; turns SIGTERM and SIGHUP into SystemExit."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup sets SIG_IGN
            signal.signal(number, _exit_on_signal)
    sys.exit(run(prog_name=prog_name))


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    # A SystemExit lets ``finally`` blocks restore the terminal's cursor and echo.
    raise SystemExit(128 + number)
