"""Converts the options of a launch, including those for files of other launchers; defines ``gnnfleet import``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from launcher.cli.completion import host_names
from launcher.cli.options import F, GroupedOptions, OutputFile, examples, with_options
from launcher.config.importers.base import NODES_ONLY, Flags
from launcher.config.importers.pyg_command import parse_remote
from launcher.errors import UsageError
from launcher.run.config_of_options import TRAINER_ONLY, overrides_of, wait_limit
from launcher.run.options import LaunchOptions
from launcher.text import say


def options_of(ctx: click.Context, values: dict[str, Any]) -> LaunchOptions:
    """Convert the options of a launch, given before or after the subcommand, to ``LaunchOptions``.

    Options after the subcommand take precedence; ``--set``, ``--include`` and ``--exclude`` of both places are joined.
    Raises UsageError or click.UsageError if options are missing or contradict each other.
    """
    before: dict[str, Any] = ctx.obj or {}
    merged = {name: values[name] if values[name] not in (None, (), False) else before.get(name) for name in values}
    sets, include, exclude = (joined(before, name, values[name]) for name in ("sets", "include", "exclude"))
    merged["config"] = config_of(merged)
    if merged["config"] is None:
        raise click.UsageError("give the cluster file: --config cluster.yml (`gnnfleet init` writes one)", ctx)
    quoted = ctx.meta.get("remote")  # the training command, if it was given in quotes
    remote = parse_remote(quoted) if quoted else None
    own_command = ctx.meta.get("own_command", ())
    if own_command and remote:
        raise click.UsageError("a quoted command and a command after -- are both given; give one of them", ctx)
    for name in TRAINER_ONLY:
        if own_command and merged.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is for the bundled trainer; put options of your own command after --", ctx)
    # How to read a file of another launcher.
    names = (
        "nodes", "group", "dataset", "batch_size", "master_addr", "num_nodes", "workspace", "part_config",
        "dataset_root_dir",
    )  # fmt: skip
    return LaunchOptions(
        config=merged["config"],
        overrides=overrides_of(merged, sets),
        include=include,
        exclude=exclude,
        run_id=merged["run_id"],
        own_command=own_command or (remote.own_command if remote else ()),
        as_json=bool(merged["as_json"]),
        verbose=bool(merged["verbose"]),
        plain=bool(merged.get("plain")),
        detach=bool(merged.get("detach")),
        wait=wait_limit(merged.get("wait")),
        nodes_needed=merged.get("nodes_needed") or "",
        resumed_from=merged.get("resumed_from"),
        flags=Flags(
            **{name: merged.get(name) for name in names}, extra_envs=merged.get("extra_env") or (), remote=remote
        ),
    )


def joined(before: Mapping[str, Any], name: str, after: Sequence[str]) -> tuple[str, ...]:
    """Return the values of a repeatable option given before a subcommand, then those given after it."""
    return (*(before.get(name) or ()), *after)


#: Commands that accept torch_geometric's quoted command.
_ACCEPT_REMOTE = ("launch", "plan", "check", "import", "rehearse")

_REMOTE = re.compile(r"(?!-).*\bpython[0-9.]*\s.*", re.DOTALL)


def foreign_options(command: F) -> F:
    """Decorator that adds the options for files of other launchers.

    These are ``--nodes``, ``--dataset``, ``--group``, ``--venv`` and ``--conda``, and the flags of torch_geometric's
    launch.py. ``--help`` does not show the latter.
    """
    given = (
        click.option(
            "--nodes",
            metavar="A,B,…",
            shell_complete=host_names,
            help="Hosts instead of the file's, or N local nodes.",
        ),
        click.option("--dataset", metavar="NAME|PATH", help="Graph instead of the file's."),
        click.option("--group", metavar="NAME", help="Group of an Ansible inventory."),
        click.option("--venv", metavar="DIR", help="Virtual environment on all hosts."),
        click.option("--conda", metavar="ENV", help="Conda environment on all hosts, name or path."),
        _hidden("--ip-config", type=click.Path(path_type=Path)),
        _hidden("--workspace"),
        _hidden("--num-nodes", type=click.IntRange(1)),
        _hidden("--part-config"),
        _hidden("--dataset-root-dir"),
        _hidden("--num-epochs"),
        _hidden("--num-workers", type=click.IntRange(0), callback=_at_least_one),
        _hidden("--concurrency"),
        _hidden("--learning-rate"),
        _hidden("--ddp-port"),
        _hidden("--ssh-port"),
        _hidden("--ssh-username"),
        _hidden("--extra-env", multiple=True),
    )
    return with_options(*given)(command)


def _at_least_one(ctx: click.Context, option: click.Parameter, workers: int | None) -> int | None:
    return None if workers is None else max(1, workers)


def _hidden(name: str, **more: Any) -> Callable[[F], F]:
    return click.option(name, hidden=True, **more)


def without_remote(ctx: click.Context, words: Sequence[str]) -> list[str]:
    """Return the arguments ``words`` without the quoted training command of torch_geometric's launch.py.

    The training command is stored in ``ctx.meta["remote"]``. ``--extra_envs A=1 B=2`` becomes
    ``--extra-env A=1 --extra-env B=2``.
    """
    left: list[str] = []
    envs = False
    accepts = bool(words) and (words[0].startswith("-") or words[0] in _ACCEPT_REMOTE)
    for before, word in zip(("", *words), words, strict=False):
        if word.replace("_", "-") == "--extra-envs":
            envs = True
        elif accepts and before != "--set" and _REMOTE.fullmatch(word) and "remote" not in ctx.meta:
            ctx.meta["remote"] = word
        else:
            envs = envs and not word.startswith("-") and "=" in word
            left += ["--extra-env", word] if envs else [word]
    return left


def config_of(values: Mapping[str, Any]) -> Path | None:
    """Return the path of the config file given by ``--config`` or by torch_geometric's ``--ip_config``.

    The path in ``--ip_config`` is relative to ``--workspace`` or, if there is no such file, to the current directory.
    Without either option, returns the placeholder ``NODES_ONLY`` if ``--nodes`` is given, else None. Raises UsageError
    if ``--config`` and ``--ip_config`` are both given.
    """
    config, ip_config = values.get("config"), values.get("ip_config")
    if ip_config is None:
        return config or (NODES_ONLY if values.get("nodes") else None)
    if config is not None:
        raise UsageError("--config and --ip_config are both given; keep the one that lists the hosts")
    in_workspace = Path(os.path.expanduser(values.get("workspace") or ".")) / ip_config
    return in_workspace if in_workspace.exists() else Path(ip_config)


@click.command(
    "import",
    cls=GroupedOptions,
    epilog=examples("import hosts.ini --group gpu --dataset ogbn-products -o cluster.yml"),
    short_help="Convert another launcher's host list or config.",
)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--output", "-o", type=OutputFile(or_stdout=True), metavar="FILE", help="File to write; default: stdout.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.pass_context
def _import(ctx: click.Context, file: Path | None, output: Path | None, force: bool, **values: Any) -> None:
    """Convert another launcher's host list or config to a commented cluster.yml.

    FILE may be GLT's YAML, an ip_config of torch_geometric or DGL, a hostfile of DeepSpeed or OpenMPI, or an Ansible
    inventory; gnnfleet recognises which. Flags of the other launcher are accepted too (docs/migrating.md).
    """
    options = options_of(ctx, {**values, "config": values.get("config") or file})
    text = imported(options, (output or Path("cluster.yml")).absolute().parent)
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists() and not force:
        raise UsageError(f"{output} exists already; choose another name, or give --force")
    from launcher.files import write_whole

    write_whole(output, text)
    say(f"{output} written; next: gnnfleet check --config {output}")


def import_command(config_options: Callable[[click.Command], click.Command]) -> click.Command:
    """Return the click command ``gnnfleet import``. It accepts all launch options; its help lists the relevant ones."""
    command = config_options(_import)
    shown = ("file", "output", "force", "sets", "dataset", "nodes", "group", "venv", "conda", "epochs", "batch_size")
    for option in command.params:
        if isinstance(option, click.Option):
            option.hidden = option.name not in shown
    command.params.sort(key=lambda param: shown.index(param.name) if param.name in shown else len(shown))
    return command


def imported(options: LaunchOptions, folder: Path) -> str:
    """Convert another launcher's file and flags; return the text of a cluster.yml.

    ``folder``: where the cluster.yml will be stored; its relative paths start there. Raises ConfigError for problems in
    the launcher's file, and UsageError if the file is not one of another launcher.
    """
    from launcher.config.importers.detect import read_foreign
    from launcher.config.importers.export import cluster_yml
    from launcher.config.loader import overridden
    from launcher.run.config_of_options import foreign_overrides, read_config

    foreign = read_foreign(options.config, options.flags)
    if foreign is None:
        if not options.config.exists():
            raise UsageError(f"{options.config}: no such file")
        raise UsageError(
            f"{options.config} is not GLT's YAML, an ip_config, a hostfile or an Ansible inventory; "
            "a cluster.yml needs no import"
        )
    read_config(options)  # raises the file's problems, prints which format was recognised
    overrides, notes = foreign_overrides(options, foreign)
    tree = overridden(options.config, overrides, foreign, lambda problem: None)
    if options.own_command:
        notes = (*notes, f"note: launch with -- {' '.join(options.own_command)}")
    noted = replace(foreign, notes=tuple(note.removeprefix("note: ") for note in notes))
    return cluster_yml(noted, tree, str(options.config), folder)
