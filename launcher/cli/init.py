"""``gnnfleet init``: writes a cluster.yml for given hosts, or copies a template."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import host_names, template_names
from launcher.cli.options import GroupedOptions, OutputFile, console_of, program_name
from launcher.errors import UsageError
from launcher.text import say

if TYPE_CHECKING:
    from launcher.init.request import InitRequest

_EPILOG = """Exit status: 0 written and checked; 2 bad usage; 3 a host was left out, or `check` found a problem.

\b
Example:
  gnnfleet init gnn1 alice@gnn2 --dataset ogbn-products -o cluster.yml"""

_OPTIONS = (
    click.argument("hosts", nargs=-1, shell_complete=host_names),
    click.option("--output", "-o", type=OutputFile(), default="cluster.yml", metavar="FILE",
                 help="File to write; default: cluster.yml."),
    click.option("--hosts", "more_hosts", multiple=True, metavar="A,B", shell_complete=host_names,
                 help="More hosts, separated by commas."),
    click.option("--user", metavar="NAME", help="SSH user, unless ~/.ssh/config names one."),
    click.option("--key", metavar="FILE", help="Private key on this machine."),
    click.option("--password", is_flag=True, help="Ask for an SSH password."),
    click.option("--host-keys", type=click.Choice(["strict", "accept-new", "insecure"]), metavar="MODE",
                 help="Unknown keys: strict, accept-new or insecure."),
    click.option("--venv", metavar="DIR", help="Virtual environment; default: searched for."),
    click.option("--conda", metavar="ENV", help="Conda environment, by name or path."),
    click.option("--python", metavar="FILE", help="Python interpreter."),
    click.option("--dataset", metavar="NAME|PATH", help="A .pt file, a folder, ogbn-products, …"),
    click.option("--source", metavar="PATH", help="Input of the dataset, or download folder."),
    click.option("--shared", metavar="DIR", help="Folder shared by all hosts, for the parts."),
    click.option("--yes", "-y", is_flag=True, help="Ask nothing; default graph: synthetic."),
    click.option("--force", is_flag=True, help="Replace FILE even if it was edited."),
    click.option("--no-check", is_flag=True, help="Do not run `check` on the new file."),
    click.option("--template", metavar="NAME", shell_complete=template_names,
                 help="Copy this template; connect to no host."),
    click.option("--list", "listed", is_flag=True, help="List the templates."),
    click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, all else to stderr."),
)  # fmt: skip


@click.command(
    cls=GroupedOptions, epilog=_EPILOG, short_help="Write a cluster.yml for given hosts, or copy a template."
)
@click.pass_context
def init(ctx: click.Context, **values: Any) -> None:
    """Write a cluster.yml from the Pythons and GPUs found on the hosts.

    HOSTS: gnn1 alice@gnn2:2222 node[01-04].lab; `localhost localhost` stands for two local nodes. Asks for missing
    values at a terminal.
    """
    if values["listed"]:
        from launcher.init.templates import templates

        found = templates()
        if bool(values["as_json"]):
            click.echo(
                json.dumps([{"name": one.name, "about": one.about, "path": str(one.path)} for one in found], indent=1)
            )
            return
        width = max(len(one.name) for one in found)
        for one in found:
            say(f"  {one.name:<{width}}  {one.about}", stderr=False)
        return
    dest: Path = values["output"]
    ask = sys.stdin.isatty() and sys.stderr.isatty() and not values["yes"] and not values["as_json"]
    if values["template"]:
        from launcher.files import write_whole
        from launcher.init.templates import copy_of, named
        from launcher.init.wizard import check_writable

        template = named(values["template"])
        check_writable(dest, values["force"], ask)
        write_whole(dest, copy_of(template, dest))
        say(
            f"Wrote {dest}: {template.about}.\nIts first lines explain what to change and how to launch it.",
            stderr=False,
        )
        return
    from launcher.init.wizard import InitOptions, check_writable, write_config

    request = _request_of(values)
    if not ask:
        yes = bool(values["yes"])
        missing = [] if request.hosts else ["the hosts (gnnfleet init gnn1 gnn2)"]
        if not (request.dataset or yes):
            missing.append("the graph (--dataset NAME or PATH, or --yes for a synthetic one)")
        if missing:
            why = "--yes asks no questions" if yes else "no terminal to ask questions on"
            raise UsageError(f"{why}; give {' and '.join(missing)}")
    check_writable(dest, values["force"], ask)
    if ask:
        from launcher.init.questions import ask_graph, ask_hosts
        from launcher.init.request import config_of

        request = replace(request, hosts=request.hosts or ask_hosts())
        config_of(request)  # reports invalid hosts before the next question
        if not request.dataset:
            dataset, source = ask_graph()
            request = replace(request, dataset=dataset, source=source)
    as_json = bool(values["as_json"])
    options = InitOptions(console_of(as_json), ask, not values["no_check"], as_json, program_name(ctx))
    ctx.exit(write_config(request, dest, options))


for _option in _OPTIONS:  # applied to a Command, options are appended in this order
    init = _option(init)


def _request_of(values: dict[str, Any]) -> InitRequest:
    from launcher.files import written_path
    from launcher.init.request import InitRequest, dataset_of, existing, split_hosts

    environment = {name: values[name] for name in ("venv", "conda", "python") if values[name]}
    if len(environment) > 1:
        raise UsageError(
            f"{' and '.join(f'--{name}' for name in environment)}: give only the one in which torch is installed"
        )
    dataset, source = dataset_of(values["dataset"]) if values["dataset"] else ("", None)
    if values["source"]:
        source = written_path(
            existing(values["source"]) if dataset in ("", "file", "tables") else Path(values["source"]).absolute()
        )
    request = InitRequest(
        hosts=split_hosts([*values["hosts"], *values["more_hosts"]]),
        dataset=dataset or ("file" if source else ""),
        source=source,
        shared=values["shared"].rstrip("/") if values["shared"] else None,
        key=written_path(Path(os.path.expanduser(values["key"])).absolute()) if values["key"] else None,
        **{name: values[name] for name in ("user", "password", "host_keys")},
    )
    for name, text in environment.items():  # the shell has expanded ~, but home folders differ between hosts
        request = request.with_environment(name, written_path(Path(text)) if "/" in text else text)
    return request
