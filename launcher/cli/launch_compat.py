"""Options for other launchers' files, and ``gnnfleet import``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from launcher.cli.completion import host_names
from launcher.cli.options import F, examples, with_options
from launcher.config.importers.base import NODES_ONLY, Flags
from launcher.config.importers.pyg_command import Remote, parse_remote
from launcher.errors import UsageError
from launcher.run.options import TRAINER_ONLY, LaunchOptions, overrides_of


def _options(ctx: click.Context, values: dict[str, Any]) -> LaunchOptions:
    """One invocation's options; those before a subcommand count too, unless it repeats them."""
    before: dict[str, Any] = ctx.obj or {}
    merged = {name: values[name] if values[name] not in (None, (), False) else before.get(name) for name in values}
    sets, include, exclude = (_repeated(before, name, values[name]) for name in ("sets", "include", "exclude"))
    merged["config"] = config_of(merged)
    if merged["config"] is None:
        raise click.UsageError("give the cluster file: --config cluster.yml (templates/cluster.yml is a start)", ctx)
    remote = remote_of(ctx)
    own_command = ctx.meta.get("own_command", ())
    if own_command and remote:
        raise click.UsageError("a quoted command and a command after -- are both given; keep one", ctx)
    for name in TRAINER_ONLY:
        if own_command and merged.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{flag} is for the bundled trainer; give your own command its options after --", ctx
            )
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
        flags=flags_of(merged, remote),
    )


def _repeated(before: Mapping[str, Any], name: str, after: Sequence[str]) -> tuple[str, ...]:
    """A repeatable option as given before a subcommand and after it."""
    return (*(before.get(name) or ()), *after)


_TAKE_REMOTE = ("launch", "plan", "check", "import")  #: commands that may be given torch_geometric's quoted command

_REMOTE = re.compile(r"(?!-).*\bpython[0-9.]*\s.*", re.DOTALL)


def foreign_options(command: F) -> F:
    """Host lists without a config of ours. Flags that only torch_geometric's launch.py has are taken, not shown."""
    given = (
        click.option(
            "--nodes",
            metavar="A,B,…",
            shell_complete=host_names,
            help="Hosts, with no file or in place of the file's; a number: here.",
        ),
        click.option("--dataset", metavar="NAME|PATH", help="Another graph than the file's, or one for a host list."),
        click.option("--group", metavar="NAME", help="Group of an Ansible inventory."),
        click.option("--venv", metavar="DIR", help="Virtual environment on the hosts, in place of the file's."),
        click.option("--conda", metavar="ENV", help="Conda environment on the hosts, by name or path."),
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
    """No worker processes mean one thread here."""
    return None if workers is None else max(1, workers)


def _hidden(name: str, **more: Any) -> Callable[[F], F]:
    return click.option(name, hidden=True, **more)


def without_remote(ctx: click.Context, words: Sequence[str]) -> list[str]:
    """``words`` less the quoted command of torch_geometric's launch.py, which is kept in ``ctx.meta``; and its
    ``--extra_envs A=1 B=2`` as options of one value each."""
    left: list[str] = []
    envs = False
    takes = bool(words) and (words[0].startswith("-") or words[0] in _TAKE_REMOTE)
    for before, word in zip(("", *words), words, strict=False):
        if word.replace("_", "-") == "--extra-envs":
            envs = True
        elif takes and before != "--set" and _REMOTE.fullmatch(word) and "remote" not in ctx.meta:
            ctx.meta["remote"] = word
        else:
            envs = envs and not word.startswith("-") and "=" in word
            left += ["--extra-env", word] if envs else [word]
    return left


def remote_of(ctx: click.Context) -> Remote | None:
    """The quoted command, read. Raises UsageError."""
    command = ctx.meta.get("remote")
    return parse_remote(command) if command else None


def config_of(values: Mapping[str, Any]) -> Path | None:
    """The file: ours, or torch_geometric's by --ip_config, which is looked for in its --workspace first."""
    config, ip_config = values.get("config"), values.get("ip_config")
    if ip_config is None:
        return config or (NODES_ONLY if values.get("nodes") else None)
    if config is not None:
        raise UsageError("--config and --ip_config are both given; keep the one that lists the hosts")
    there = Path(values.get("workspace") or ".").expanduser() / ip_config
    return there if there.exists() else Path(ip_config)


def flags_of(values: Mapping[str, Any], remote: Remote | None) -> Flags:
    """What the command line says beside a foreign file."""
    names = (
        "nodes", "group", "dataset", "batch_size", "master_addr", "num_nodes", "workspace", "part_config",
        "dataset_root_dir",
    )  # fmt: skip
    return Flags(**{name: values.get(name) for name in names}, extra_envs=values.get("extra_env") or (), remote=remote)


@click.command(
    "import",
    epilog=examples("import hosts.ini --group gpu --dataset ogbn-products -o cluster.yml"),
)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Default: stdout.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.pass_context
def _import(ctx: click.Context, file: Path | None, output: Path | None, force: bool, **values: Any) -> None:
    """Write another launcher's host list or config as a commented cluster.yml.

    Taken are GLT's YAML, ip_config files of torch_geometric and DGL, DeepSpeed's and OpenMPI's hostfiles, and Ansible
    inventories, known by their content, together with the flags that the other launcher was given. docs/migrating.md
    has a table.
    """
    options = _options(ctx, {**values, "config": values.get("config") or file})
    written = imported(options, (output or Path("cluster.yml")).absolute().parent)
    if output is None:
        click.echo(written, nl=False)
        return
    if output.exists() and not force:
        raise UsageError(f"{output} is there already; choose another name, or give --force")
    from launcher.files import write_whole

    write_whole(output, written)
    click.echo(f"{output} written; next: gnnfleet check --config {output}", err=True)


def import_command(config_options: Callable[[click.Command], click.Command]) -> click.Command:
    """``gnnfleet import``; it takes all that a launch takes, and shows what is of use here."""
    command = config_options(_import)
    shown = ("file", "output", "force", "sets", "dataset", "nodes", "group", "venv", "conda", "epochs", "batch_size")
    for option in command.params:
        if isinstance(option, click.Option):
            option.hidden = option.name not in shown
    command.params.sort(key=lambda param: shown.index(param.name) if param.name in shown else len(shown))
    return command


def imported(options: LaunchOptions, folder: Path) -> str:
    """The foreign file as text of ours that lies in ``folder``. Raises ConfigError and UsageError."""
    from launcher.config.importers.detect import read_foreign
    from launcher.config.importers.export import cluster_yml
    from launcher.config.loader import overridden
    from launcher.run.options import foreign_overrides, read_config

    foreign = read_foreign(options.config, options.flags)
    if foreign is None:
        if not options.config.exists():
            raise UsageError(f"{options.config}: there is no such file")
        raise UsageError(
            f"{options.config}: neither GLT's YAML, nor an ip_config, hostfile or Ansible inventory; "
            "a cluster.yml needs no import"
        )
    read_config(options)  # its mistakes, and what it was taken for
    overrides, notes = foreign_overrides(options, foreign)
    tree = overridden(options.config, overrides, foreign, lambda problem: None)
    if options.own_command:
        notes = (*notes, f"note: launch it with -- {' '.join(options.own_command)}")
    told = replace(foreign, notes=tuple(note.removeprefix("note: ") for note in notes))
    return cluster_yml(told, tree, str(options.config), folder)
