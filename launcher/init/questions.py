"""Questions that ``gnnfleet init`` asks at a terminal, and messages about hosts that could not be reached."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import click
from rich.console import Console
from rich.markup import escape

from launcher.errors import AuthError, NodeError, PasswordRefused, UsageError
from launcher.init.discover import Discovery, HostFacts
from launcher.init.request import InitRequest, config_of, dataset_of, split_hosts
from launcher.text import OWN_VENV, count, say
from launcher.transport import login_words

_MAX_LOGINS = 3  #: login commands in one message


def _is_unknown(error: NodeError) -> bool:
    """Whether ``error`` means that an SSH host key, of the host or a jump host, is unknown; False if it has changed."""
    return error.code == "host-key-unknown"


def reasons(request: InitRequest, errors: Mapping[int, NodeError]) -> Iterator[str]:
    """Yield one line per host: its name, the error, and a remedy unless ``common_remedy`` returns one for the host."""
    common = common_remedy(request, errors)
    for k, error in errors.items():
        words = error.message if common and _is_unknown(error) else reason(request, k, error)
        yield f"{request.hosts[k]}: {words}"


def common_remedy(request: InitRequest, errors: Mapping[int, NodeError]) -> str:
    """Return one remedy for all hosts whose SSH keys are unknown; "" for fewer than two such hosts."""
    unknown = [k for k, error in errors.items() if _is_unknown(error)]
    return _remedy(request, unknown) if len(unknown) > 1 else ""


def reason(request: InitRequest, k: int, error: NodeError) -> str:
    """Return error and remedy of one host, without the host's name."""
    remedy = _remedy(request, [k]) if _is_unknown(error) else error.remedy
    return error.message + (f" – {remedy}" if remedy else "")


def _remedy(request: InitRequest, ranks: list[int]) -> str:
    nodes = config_of(request).nodes
    logins = [shlex.join(login_words(config_of(request), nodes[k], "-o", "StrictHostKeyChecking=ask")) for k in ranks]
    fingerprints = "compare the fingerprint" + ("s" if len(ranks) > 1 else "")
    shown = ", ".join(f"`{login}`" for login in logins[:_MAX_LOGINS]) + (", …" if len(logins) > _MAX_LOGINS else "")
    return f"{fingerprints} and log in once ({shown}), or run this command again with --host-keys accept-new"


T = TypeVar("T")

_MAX_LISTED = 8  #: hosts or environments listed before a question


def ask_hosts() -> tuple[str, ...]:
    """Ask for the hosts; an empty answer gives two nodes on this machine."""
    answer = _ask(
        "Hosts (user@host, node[01-04].lab; empty: two nodes on this machine)", lambda text: split_hosts([text])
    )
    return answer or ("localhost", "localhost")


def ask_graph() -> tuple[str, str | None]:
    """Ask for the graph; return its ``data.dataset`` and ``data.source``."""
    question = "Graph (a .pt file or folder here, ogbn-products, Planetoid:Cora …)"
    return _ask(question, dataset_of, default="synthetic")


@dataclass(frozen=True)
class _SharedEnvironment:
    """Environments at the same path on one or more hosts."""

    key: str  #: venv, conda or python
    path: str
    hosts: tuple[int, ...]  #: indices of the hosts in the request
    versions: Mapping[str, str]  #: package → version, on the first of these hosts


def _shared_environments(facts: Mapping[int, HostFacts]) -> tuple[_SharedEnvironment, ...]:
    """Return the environments that have all packages, one per path; those on most hosts come first."""
    found: dict[tuple[str, str], list[int]] = {}
    versions: dict[tuple[str, str], Mapping[str, str]] = {}
    for k, host in facts.items():
        for one in host.environments:
            if one.complete:
                found.setdefault((one.key, one.path), []).append(k)
                versions.setdefault((one.key, one.path), one.versions)
    shared = [_SharedEnvironment(*place, tuple(hosts), versions[place]) for place, hosts in found.items()]
    return tuple(sorted(shared, key=lambda one: -len(one.hosts)))


def ask_environment(request: InitRequest, discovery: Discovery) -> InitRequest:
    """Ask which environment to use; return the request with the answer.

    Asks only if no host has an environment with all packages, or if several such environments are on all hosts.
    """
    found = _shared_environments(discovery.facts)
    if request.environment or request.local or not discovery.facts or len(found) == 1:
        return request
    if not found:
        return replace(
            request, venv=_ask("No host has all packages. Virtual environment to use", str, default=OWN_VENV)
        )
    everywhere = len(found[0].hosts) == len(discovery.facts)
    if everywhere and len(found[1].hosts) < len(discovery.facts) or not everywhere:
        return request  # no question if exactly one environment, or none, is on all hosts
    choices = found[:_MAX_LISTED]
    for number, one in enumerate(choices, 1):
        click.echo(f"  {number}  {one.path} (torch {one.versions['torch']}) on {count(len(one.hosts), 'host')}")
    number = click.prompt("Environment", type=click.IntRange(1, len(choices)), default=1)
    chosen = choices[number - 1]
    return request.with_environment(chosen.key, chosen.path)


def ask_access(request: InitRequest, errors: Mapping[int, NodeError], console: Console) -> InitRequest:
    """Ask whether to trust unknown host keys and whether to use a password; return the request with the answers."""
    unknown = [k for k, error in errors.items() if _is_unknown(error)]
    if unknown and request.host_keys is None:
        for k in unknown[:_MAX_LISTED]:
            console.print(f"  {escape(f'{request.hosts[k]}: {errors[k].message}')}", soft_wrap=True)
        if click.confirm(f"Trust {'this key' if len(unknown) == 1 else f'these {len(unknown)} keys'} from now on?"):
            return replace(request, host_keys="accept-new")
    refused = [
        error for error in errors.values() if isinstance(error, AuthError) and not isinstance(error, PasswordRefused)
    ]
    if refused and not request.password:
        for one in refused[:_MAX_LISTED]:
            console.print(f"  {escape(f'{one.host}: {one.message}')}", soft_wrap=True)
        if click.confirm("Log in with a password?"):
            return replace(request, password=True)
    return request


def _ask(question: str, read: Callable[[str], T], default: str = "") -> T:
    """Ask until ``read(answer)`` does not raise UsageError; return the result of ``read``."""
    while True:
        answer = click.prompt(question, default=default, show_default=bool(default)).strip()
        try:
            return read(answer)
        except UsageError as error:
            say(str(error), "red")
