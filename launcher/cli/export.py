"""``gnnfleet export``: writes a run for Kubernetes, Slurm, torchrun or plain shells."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.cli.launch_compat import options_of
from launcher.cli.options import GroupedOptions, OutputFile, examples
from launcher.errors import UsageError
from launcher.text import say

_KINDS = ("kubernetes", "slurm", "torchrun", "bash")

_OPTIONS = (
    click.option("--to", "kind", type=click.Choice(_KINDS), required=True, metavar="KIND",
                 help=f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}."),
    click.option("--output", "-o", type=OutputFile(or_stdout=True), metavar="FILE",
                 help="File to write; default: stdout."),
    click.option("--force", is_flag=True, help="Overwrite existing files."),
    click.option("--image", metavar="IMAGE", help="kubernetes: image with gnnfleet."),
    click.option("--workload", type=click.Choice(["jobset", "job"]), default="jobset",
                 metavar="KIND", help="kubernetes: jobset (default) or job."),
    click.option("--claim", "claims", multiple=True, metavar="NAME=PATH",
                 help="kubernetes: volume claim to mount; repeatable."),
    click.option("--storage", default="50Gi", metavar="SIZE",
                 help="kubernetes: size of a new claim; default: 50Gi."),
    click.option("--namespace", default="", metavar="NAME", help="kubernetes: namespace."),
    click.option("--store-secret", default="", metavar="NAME",
                 help="kubernetes: Secret with the login of data.store."),
    click.option("--slurm", "slurm", multiple=True, metavar="KEY=VALUE,…",
                 help="slurm: options of sbatch, as time=2:00:00."),
)  # fmt: skip

#: Names of the options for one kind only, or with a default for one kind.
_OWN = ("image", "workload", "claims", "storage", "namespace", "store_secret", "slurm")

_SHOWN = ("config", "sets", "run_id", "kind", "output", "force", *_OWN)


@click.command(
    "export",
    cls=GroupedOptions,
    epilog="Exit status: 0 written; 2 bad usage or config.\n\n"
    + examples(
        "export -c cluster.yml --to kubernetes --image me/gnn:1 -o run.yml",
        "export -c cluster.yml --to slurm -o run.sbatch",
    ),
    short_help="Write a run for Kubernetes, Slurm, torchrun or shells.",
)
@click.pass_context
def _export(ctx: click.Context, kind: str, output: Path | None, force: bool, **values: Any) -> None:
    """Write a run as Kubernetes manifests, an sbatch script, or a script for torchrun or bash.

    The file starts the run without gnnfleet's launcher and without SSH. You can edit it. Words after -- are your own
    training command.
    """
    from launcher.config.resolve import resolve_run
    from launcher.export.placed_plan import ExportRequest
    from launcher.export.scripts import export_script, key_path
    from launcher.files import write_whole
    from launcher.run.config_of_options import read_config
    from launcher.run.options import choose_run_id

    own = {name: values.pop(name) for name in _OWN}
    options = options_of(ctx, values)
    config = resolve_run(read_config(options))
    run_id = choose_run_id(config, options.run_id)
    request = ExportRequest(config, run_id, options.own_command, Path.cwd())

    # Options of other kinds are an error.
    for name, value in own.items():
        of_kubernetes = name in ("image", "claims", "namespace", "store_secret")
        if value and (kind != "kubernetes" if of_kubernetes else name == "slurm" and kind != "slurm"):
            option = {"claims": "claim"}.get(name, name).replace("_", "-")
            raise UsageError(
                f"--{option} is for --to {'kubernetes' if of_kubernetes else 'slurm'}, not for --to {kind}"
            )
    if kind == "kubernetes":
        from launcher.export.kubernetes import export_kubernetes
        from launcher.export.pods import Cluster

        if not own["image"]:
            raise UsageError(
                "--to kubernetes needs --image: a container image in which gnnfleet is installed (docs/export.md has a "
                "Dockerfile)"
            )
        claims = []
        for text in own["claims"]:
            name, _, path = text.partition("=")
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) or not path.startswith("/"):
                raise UsageError(
                    f"--claim {text}: give NAME=PATH, such as datasets=/data, with an absolute path in the pods"
                )
            claims.append((name, path.rstrip("/")))
        cluster = Cluster(
            own["image"], own["workload"], tuple(claims), own["storage"], own["namespace"], own["store_secret"]
        )
        made = export_kubernetes(request, cluster)
        text, secret, notes = made.text(), made.secret_text(), made.notes
    else:
        from launcher.plan.sbatch import parse_options

        script = export_script(kind, request, parse_options(",".join(own["slurm"])), output)
        text, secret, notes = script.text, script.key, script.notes

    if output is None:
        click.echo(text + secret, nl=False)
    else:
        files = {output: text, **({key_path(output): secret} if secret else {})}
        for path in files:
            if path.exists() and not force:
                raise UsageError(f"{path} exists already; choose another name, or give --force")
        for path, content in files.items():
            write_whole(path, content, private=path != output)
        say(f"wrote {', '.join(map(str, files))}")
    for note in notes:
        say(f"note: {note}", "yellow")


def export_command(config_options: Callable[[click.Command], click.Command]) -> click.Command:
    """Return the click command ``gnnfleet export``. It accepts all options of a launch; its help lists some."""
    command: Any = _export
    for option in _OPTIONS:  # a Command appends them in this order
        command = option(command)
    command = config_options(command)
    for param in command.params:
        if isinstance(param, click.Option):
            param.hidden = param.hidden or param.name not in _SHOWN
    return command
