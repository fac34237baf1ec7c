"""Tests whether the nodes that hold parts can read ``data.store``, with their packages and credentials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.config.roles import store_packages
from launcher.errors import FleetError
from launcher.preflight.finding import Finding, connect_finding
from launcher.preflight.survey import Survey
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_TIMEOUT = 60.0  # seconds; importing the client of a store from a shared disk is slow


def store_findings(survey: Survey, agents: Mapping[int, NodeAgent]) -> Iterator[Finding]:
    """Yield a finding for each node that fetches parts.

    Skips nodes that lack a package which reads the store: ``check_packages`` reports them.
    """
    config, packages = survey.config, store_packages(survey.config)

    def ask(k: int) -> tuple[str, bool]:
        request = {"url": config.data.store, "options": dict(config.data.store_options)}
        reply = agents[k].call("store_access", {**request, "env": dict(config.nodes[k].env)}, _TIMEOUT)
        return str(reply["error"]), bool(reply["denied"])

    asked = [k for k in sorted(agents) if config.nodes[k].holds and all(survey.version(k, name) for name in packages)]
    answers = on_nodes(asked, ask, timeout=2 * _TIMEOUT)
    for k, error in sorted(answers.errors.items()):
        if not isinstance(error, FleetError | TimeoutError):
            raise error
        yield connect_finding(config, k, error)
    for k, (text, denied) in sorted(answers.values.items()):
        if text:  # a store that is still empty may deny access, too
            yield survey.finding(k, "warn" if denied else "block", "store", text)
        else:
            yield survey.finding(k, "ok", "store", f"{config.data.store} can be read")
