"""Tests ``run.notify``: the lead node sends a message to each target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.config.roles import lead
from launcher.errors import FleetError
from launcher.node.programs.notify import label
from launcher.preflight.finding import Finding, connect_finding
from launcher.preflight.survey import Survey
from launcher.transport.rpc import NodeAgent

_TIMEOUT = 60.0  # seconds for all targets


def notice_findings(survey: Survey, agents: Mapping[int, NodeAgent]) -> Iterator[Finding]:
    """Yield a finding for each target: whether the message arrived."""
    config = survey.config
    first, targets = lead(config), config.run.notify
    if not targets:
        yield survey.finding(first, "warn", "notify", "run.notify names nobody to tell")
    if first not in agents or not targets:
        return
    message = {
        "text": f"gnnfleet: a test message of `gnnfleet check` for {config.name}",
        "event": "test",
        "from": config.nodes[first].host,
    }
    asked = {"targets": targets, "message": message, "env": dict(config.nodes[first].env), "pauses": ()}
    try:
        errors = agents[first].call("notify", asked, _TIMEOUT)["errors"]
    except (FleetError, TimeoutError) as error:
        yield connect_finding(config, first, error)
        return
    for number, target in enumerate(targets):
        if why := errors.get(number):
            yield survey.finding(first, "block", "notify", str(why), "correct run.notify, or open the way to it")
        else:
            yield survey.finding(first, "ok", "notify", f"{label(target)} took a message")
