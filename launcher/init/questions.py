"""Questions that ``gnnfleet init`` asks at a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import click
from rich.console import Console
from rich.markup import escape

from launcher.errors import AuthError, HostKeyError, NodeError, PasswordRefused, UsageError
from launcher.init.choose import offers
from launcher.init.discover import Discovery
from launcher.init.request import InitRequest, config_of, dataset_of, split_hosts
from launcher.preflight.finding import login_words
from launcher.text import OWN_VENV, count

_NAMED = 3  #: hosts whose logins are written out


def is_unknown(error: NodeError) -> bool:
    """Whether the host, or one on the way to it, shows a key that was never seen."""
    return isinstance(error, HostKeyError) and "is not known" in error.message


def reasons(request: InitRequest, errors: Mapping[int, NodeError]) -> Iterator[str]:
    """A line for each host, less what ``common_cure`` says."""
    common = common_cure(request, errors)
    for k, error in errors.items():
        words = error.message if common and is_unknown(error) else reason(request, k, error)
        yield f"{request.hosts[k]}: {words}"


def common_cure(request: InitRequest, errors: Mapping[int, NodeError]) -> str:
    """What to do about all unknown keys together; '' where there are not several."""
    unknown = [k for k, error in errors.items() if is_unknown(error)]
    return _cure(request, unknown) if len(unknown) > 1 else ""


def reason(request: InitRequest, k: int, error: NodeError) -> str:
    """Of one host, without its name."""
    remedy = _cure(request, [k]) if is_unknown(error) else error.remedy
    return error.message + (f" – {remedy}" if remedy else "")


def _cure(request: InitRequest, ranks: list[int]) -> str:
    nodes = config_of(request).nodes
    logins = [shlex.join(login_words(config_of(request), nodes[k])) for k in ranks]
    fingerprints = "compare the fingerprint" + ("s" if len(ranks) > 1 else "")
    shown = ", ".join(f"`{login}`" for login in logins[:_NAMED]) + (", …" if len(logins) > _NAMED else "")
    return f"{fingerprints} and log in once ({shown}), or repeat this with --host-keys accept-new"


T = TypeVar("T")

_SHOWN = 8  #: hosts, or environments, that are shown one by one


def ask_hosts() -> tuple[str, ...]:
    """Two nodes on this machine when nothing is typed."""
    answer = _asked(
        "Hosts (user@host, node[01-04].lab; nothing: two nodes on this machine)", lambda text: split_hosts([text])
    )
    return answer or ("localhost", "localhost")


def ask_graph() -> tuple[str, str | None]:
    """(dataset, source)."""
    question = "Graph (a .pt file or folder here, ogbn-products, Planetoid:Cora …)"
    return _asked(question, dataset_of, default="synthetic")


def ask_environment(request: InitRequest, looked: Discovery) -> InitRequest:
    """Which of several environments; nothing is asked where there is but one, or one was named."""
    found = offers(looked.looks)
    if request.environment or request.local or not looked.looks or len(found) == 1:
        return request
    if not found:
        return replace(
            request, venv=_asked("No host has all packages. Virtual environment to use", str, default=OWN_VENV)
        )
    everywhere = len(found[0].hosts) == len(looked.looks)
    if everywhere and len(found[1].hosts) < len(looked.looks) or not everywhere:
        return request  # one fits all, or each host has its own
    choices = found[:_SHOWN]
    for number, one in enumerate(choices, 1):
        click.echo(f"  {number}  {one.path} (torch {one.versions['torch']}) on {count(len(one.hosts), 'host')}")
    number = click.prompt("Environment", type=click.IntRange(1, len(choices)), default=1)
    chosen = choices[number - 1]
    return request.with_environment(chosen.key, chosen.path)


def ask_access(request: InitRequest, errors: Mapping[int, NodeError], console: Console) -> InitRequest:
    """Host keys to learn, a password to try: what lets hosts be reached that were not; else the same request."""
    unknown = [k for k, error in errors.items() if is_unknown(error)]
    if unknown and request.host_keys is None:
        for k in unknown[:_SHOWN]:
            console.print(f"  {escape(f'{request.hosts[k]}: {errors[k].message}')}", soft_wrap=True)
        if click.confirm(f"Trust {'this key' if len(unknown) == 1 else f'these {len(unknown)} keys'} from now on?"):
            return replace(request, host_keys="accept-new")
    refused = [
        error for error in errors.values() if isinstance(error, AuthError) and not isinstance(error, PasswordRefused)
    ]
    if refused and not request.password:
        for one in refused[:_SHOWN]:
            console.print(f"  {escape(f'{one.host}: {one.message}')}", soft_wrap=True)
        if click.confirm("Log in with a password?"):
            return replace(request, password=True)
    return request


def _asked(question: str, read: Callable[[str], T], default: str = "") -> T:
    """Asks again until ``read`` takes the answer."""
    while True:
        answer = click.prompt(question, default=default, show_default=bool(default)).strip()
        try:
            return read(answer)
        except UsageError as error:
            click.secho(str(error), fg="red", err=True)
