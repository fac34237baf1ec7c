"""``gnnfleet init``: a first cluster.yml from a few host names, or a copy of a template."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import host_names, template_names
from launcher.cli.options import console_of
from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.init.request import InitRequest

_EPILOG = """\b
Examples:
  gnnfleet init
  gnnfleet init gnn1 alice@gnn2 --dataset graph.pt -o cluster.yml
  gnnfleet init 'node[01-04].lab' --user alice --yes
  gnnfleet init --template server_client -o servers.yml

Exit status: 0 written and checked; 2 bad usage; 3 a host was left out, or `check` found something in the way."""

_OPTIONS = (
    click.argument("hosts", nargs=-1, shell_complete=host_names),
    click.option("--output", "-o", type=click.Path(path_type=Path), default="cluster.yml", metavar="FILE",
                 help="File to write; default: cluster.yml."),
    click.option("--hosts", "more_hosts", multiple=True, metavar="A,B", shell_complete=host_names,
                 help="The same, separated by commas."),
    click.option("--user", metavar="NAME", help="SSH user, where ~/.ssh/config does not say."),
    click.option("--key", metavar="FILE", help="Private key on this machine."),
    click.option("--password", is_flag=True, help="Ask for an SSH password."),
    click.option("--venv", metavar="DIR", help="Virtual environment there; default: found."),
    click.option("--conda", metavar="ENV", help="Conda environment on the hosts."),
    click.option("--python", metavar="FILE", help="Python on the hosts."),
    click.option("--dataset", metavar="NAME|PATH", help="A .pt file or folder, ogbn-products …"),
    click.option("--source", metavar="PATH", help="What the dataset reads, or downloads to."),
    click.option("--shared", metavar="DIR", help="Folder of all hosts: no parts are sent."),
    click.option("--host-keys", type=click.Choice(["strict", "accept-new", "insecure"]), help="Unknown SSH keys."),
    click.option("--yes", "-y", is_flag=True, help="Ask nothing; synthetic graph by default."),
    click.option("--force", is_flag=True, help="Replace FILE, also one that was edited."),
    click.option("--no-check", is_flag=True, help="Do not run `check` on the new file."),
    click.option("--template", metavar="NAME", shell_complete=template_names,
                 help="Copy a template instead of looking at hosts."),
    click.option("--list", "listed", is_flag=True, help="List the templates."),
    click.option("--json", "as_json", is_flag=True, help="JSON on stdout, all else on stderr."),
)  # fmt: skip


@click.command(epilog=_EPILOG, short_help="Write a cluster.yml: look at hosts, or copy a template.")
@click.pass_context
def init(ctx: click.Context, **values: Any) -> None:
    """Write a commented cluster.yml: try the hosts, find their Pythons and GPUs.

    HOSTS are as for ssh: gnn1 alice@gnn2:2222 node[01-04].lab; `localhost localhost` is two nodes here.
    At a terminal it asks for what is not given.
    """
    if values["listed"]:
        return _list(bool(values["as_json"]))
    dest: Path = values["output"]
    ask = sys.stdin.isatty() and sys.stderr.isatty() and not values["yes"] and not values["as_json"]
    if values["template"]:
        return _copy(values["template"], dest, values["force"], ask)
    from launcher.init.wizard import InitOptions, make, writable_place

    request = _given(values)
    if not ask:
        _complete(request, bool(values["yes"]))
    writable_place(dest, values["force"], ask)
    if ask:
        request = _asked(request)
    as_json = bool(values["as_json"])
    manner = InitOptions(console_of(as_json), ask, not values["no_check"], as_json, _program(ctx))
    ctx.exit(make(request, dest, manner))


for _option in _OPTIONS:  # a command's own list, so in order
    init = _option(init)


def _given(values: dict[str, Any]) -> InitRequest:
    """The flags as a request. Raises UsageError."""
    from launcher.files import written_path
    from launcher.init.request import InitRequest, dataset_of, existing, split_hosts

    environment = {name: values[name] for name in ("venv", "conda", "python") if values[name]}
    if len(environment) > 1:
        raise UsageError(
            f"{' and '.join(f'--{name}' for name in environment)}: give one of them, the one that holds torch"
        )
    dataset, source = dataset_of(values["dataset"]) if values["dataset"] else ("", None)
    if values["source"]:
        source = written_path(
            existing(values["source"]) if dataset in ("", "file") else Path(values["source"]).absolute()
        )
    request = InitRequest(
        hosts=split_hosts([*values["hosts"], *values["more_hosts"]]),
        dataset=dataset or ("file" if source else ""),
        source=source,
        shared=values["shared"].rstrip("/") if values["shared"] else None,
        key=written_path(Path(values["key"]).expanduser().absolute()) if values["key"] else None,
        **{name: values[name] for name in ("user", "password", "host_keys")},
    )
    for name, text in environment.items():  # a shell has written out ~, which is another folder on the hosts
        request = request.with_environment(name, written_path(Path(text)) if "/" in text else text)
    return request


def _complete(request: InitRequest, yes: bool) -> None:
    """Without anybody to ask, the flags must say it all."""
    lacking = [] if request.hosts else ["the hosts (gnnfleet init gnn1 gnn2)"]
    lacking += [] if request.dataset or yes else ["the graph (--dataset NAME or PATH, or --yes for a synthetic one)"]
    if lacking:
        why = "--yes asks nothing" if yes else "there is no terminal to ask on"
        raise UsageError(f"{why}; give {' and '.join(lacking)}")


def _asked(request: InitRequest) -> InitRequest:
    from dataclasses import replace

    from launcher.init.questions import ask_graph, ask_hosts
    from launcher.init.request import config_of

    request = replace(request, hosts=request.hosts or ask_hosts())
    config_of(request)  # a mistake is told before the next question
    if not request.dataset:
        dataset, source = ask_graph()
        request = replace(request, dataset=dataset, source=source)
    return request


def _list(as_json: bool) -> None:
    from launcher.init.templates import templates

    found = templates()
    if as_json:
        click.echo(
            json.dumps([{"name": one.name, "about": one.about, "path": str(one.path)} for one in found], indent=1)
        )
        return
    width = max(len(one.name) for one in found)
    for one in found:
        click.echo(f"{one.name:<{width}}  {one.about}")


def _copy(name: str, dest: Path, force: bool, ask: bool) -> None:
    from launcher.files import write_whole
    from launcher.init.templates import copy_of, named
    from launcher.init.wizard import writable_place

    template = named(name)
    writable_place(dest, force, ask)
    write_whole(dest, copy_of(template, dest))
    click.echo(f"Wrote {dest}: {template.about}.\nIts first lines say what to change and how to launch it.")


def _program(ctx: click.Context) -> str:
    """How this program was called, for the commands that are told."""
    name = ctx.find_root().info_name or "gnnfleet"
    return "python launch.py" if name.endswith("launch.py") else "gnnfleet"
