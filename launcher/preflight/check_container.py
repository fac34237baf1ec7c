"""Preflight checks of the containers of ``wrap``: whether they start, and show what a run needs of the host."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from launcher.command import Command, quote
from launcher.config.schema import node_workdir
from launcher.errors import NodeCallError
from launcher.plan.model import NodeFacts
from launcher.plan.placement import at_home, container, interpreter
from launcher.preflight.finding import Finding
from launcher.preflight.survey import Inquiry, Survey
from launcher.transport.base import Transport
from launcher.transport.rpc import NodeAgent

_TIMEOUT = 300.0  # seconds; the first start may convert or load an image

_VARIABLE = "PYTHONUNBUFFERED"  # one of those that every supervisor gets

#: Namespaces that a container must share with its host: for what, and how podman and docker are told so.
_SHARED = {
    "pid": ("processes", "they are stopped and watched by their numbers on the host", "--pid=host"),
    "net": ("network", "the other nodes connect to addresses of the host", "--network=host"),
}


def agent_in_container(inquiry: Inquiry, k: int, fact: NodeFacts, transport: Transport) -> NodeAgent:
    """Start an agent in the container of a node with ``wrap``.

    Creates the node's ``workdir``, which the container must show.
    """
    config, node = inquiry.config, inquiry.config.nodes[k]
    env = {_VARIABLE: "1", **node.env}
    kernels = [quote(at_home(node.env[name], fact)) for name in ("GNNFLEET_KERNELS",) if name in node.env]
    shell = interpreter(config, k)
    setup = (*shell.setup, " ".join(["mkdir -p", quote(at_home(node_workdir(node, k), fact)), *kernels]))
    words = container(config, k, fact, env, _parts(inquiry, k, fact))
    return NodeAgent(transport, Command((*words, shell.argv[0]), env, setup=setup))


def _parts(inquiry: Inquiry, k: int, fact: NodeFacts) -> str:
    """Return the partition folder that the node reads; '' if the launch sends the parts."""
    folder = inquiry.config.nodes[k].data_folder or inquiry.config.data.folder
    return at_home(folder.rstrip("/"), fact) if inquiry.request(k)["manifest"] else ""


def ask_container(inquiry: Inquiry, k: int, fact: NodeFacts, outside: NodeAgent, inside: NodeAgent) -> dict[str, Any]:
    """Return what replaces and completes the probe of a node with ``wrap``.

    "versions" are those of the Python inside, "inside" and "outside" the replies of ``surroundings.py``. Raises
    NodeCallError if no Python runs in the container.
    """
    node = inquiry.config.nodes[k]
    folders = filter(None, [at_home(node_workdir(node, k), fact), "/tmp", _parts(inquiry, k, fact)])
    asked = {"packages": inquiry.request(k)["packages"], "folders": list(folders), "variable": _VARIABLE}
    try:
        reply = inside.call("surroundings", asked, _TIMEOUT)
    except NodeCallError as error:
        raise NodeCallError(
            f"no Python runs in the container `{shlex.join(node.wrap)}`: {error.message}",
            host=error.host,
            node_rank=k,
            remedy="`wrap` needs the program and the image on the host, and `python` an interpreter inside the image",
            code="container",
        ) from None
    return {
        "versions": reply["versions"],
        "inside": reply,
        "outside": outside.call("surroundings", {**asked, "packages": []}, _TIMEOUT),
    }


def container_findings(survey: Survey, k: int) -> Iterator[Finding]:
    inside, outside = survey.probes[k]["inside"], survey.probes[k]["outside"]
    apart = [name for name in _SHARED if inside["namespaces"][name] != outside["namespaces"][name]]
    for name in apart:
        what, why, option = _SHARED[name]
        message = f"the container has {what} of its own: {why}"
        remedy = f"let `wrap` share them with the host (podman and docker: {option})"
        yield survey.finding(k, "block", "container", message, remedy, code="container")
    hidden = [path for path, identity in outside["folders"].items() if identity != inside["folders"][path] and identity]
    if hidden:
        message = f"the container does not show {', '.join(hidden)} of the host"
        remedy = "bind them in `wrap`, each to the same path"
        yield survey.finding(k, "block", "container", message, remedy, code="container")
    if not inside["variable"]:
        message, remedy = "the container does not get environment variables of the host", "let `wrap` pass them on"
        yield survey.finding(k, "block", "container", message, remedy, code="container")
    if not (apart or hidden) and inside["variable"]:
        program = shlex.join(survey.config.nodes[k].wrap)
        yield survey.finding(k, "ok", "container", f"{inside['python']} in `{program}`")
