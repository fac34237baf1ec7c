"""The contracts of a run: conditions that hold after every scenario of the soak, the random test of ``make soak``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_kit import FaultyRun
from launching import REPOSITORY, Launched
from netns import Host
from scenario import NODE_KINDS, REASONS, Scenario
from waiting import DEADLINE

#: Name of a contract -> the condition.
CONTRACTS = {
    "ended": "the launcher ended in time",
    "cause": "the report names the process and host that failed first, and why",
    "status": "the exit status of the launcher, or of `gnnfleet collect` after a detached run",
    "traceback": "no traceback of gnnfleet's own is in the output",
    "clean": "no process, tmux session included, is left on any host after ten seconds, and those until it is noticed",
    "leases": "no lease is left",
    "sockets": "no listening or abstract socket is left",
    "survives": "a run that a fault does not concern trains on",
    "repaired": "a launch that finds a damaged part names node and file; the next launch sends the file again",
    "waits": "of two launches at once on one parts folder, one waits for the other; both succeed",
    "restarts": "a run with `run.restarts` starts again once, without the lost node, and names the cause",
    "stop": "`gnnfleet stop` ends a run that trains on",
    "agrees": "`gnnfleet status` and `gnnfleet runs` say the same as the report",
    "resume": "`gnnfleet resume` succeeds, so the next launch works",
    "curve": "the losses are those of an undisturbed run in one process",
}

#: Python code that prints the leases of all living processes on a host; these leases would block the next run.
HELD = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from launcher.node import leases; print(*leases.held())"
SSH_PORT = 22


@dataclass
class Verdict:
    """Result of a scenario. ``wrong`` maps each broken contract to a message."""

    scenario: Scenario
    wrong: dict[str, str] = field(default_factory=dict)
    reported: str = ""  #: the first line of the report, or of the output of ``gnnfleet status``
    status: int | None = None
    ended_after: float = 0.0  #: seconds from the fault until no process of the run was left

    def break_(self, contract: str, message: str) -> None:
        """Record a broken contract. Only the first message for each contract is kept."""
        assert contract in CONTRACTS
        self.wrong.setdefault(contract, message)

    def __str__(self) -> str:
        wrong = "".join(f"\n    WRONG, {name}: {text}" for name, text in self.wrong.items())
        result = "ok" if not self.wrong else "wrong"
        return f"{self.scenario}: exit {self.status}, clean after {self.ended_after:.1f} s: {result}{wrong}"


def left(hosts: Iterable[Host]) -> list[str]:
    return [f"{host.name}: {process}" for host in hosts for process in host.processes()]


def leases_of(hosts: Iterable[Host]) -> list[str]:
    found = [(host.name, host.run([sys.executable, "-c", HELD]).stdout.strip()) for host in hosts]
    return [f"{name} holds {leases}" for name, leases in found if leases]


def sockets_of(host: Host) -> list[str]:
    tables = Path(f"/proc/{host.init_pid}/net")
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in (tables / name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            ports.add(int(local.rpartition(":")[2], 16)) if state == "0A" else None
    abstract = [line.split()[-1] for line in (tables / "unix").read_text().splitlines() if "@gnnfleet" in line]
    return [f"port {port}" for port in sorted(ports - {SSH_PORT})] + abstract


def wait_until_clean(hosts: list[Host], seconds: float) -> list[str]:
    """Wait up to ``seconds`` until no process is left on ``hosts``; return the processes left."""
    deadline = time.monotonic() + seconds
    while (found := left(hosts)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def gnnfleet(
    environment: dict[str, str], *words: str, cwd: Path | str = "/", seconds: float = DEADLINE
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "launch.py"), *words]
    environment = {"COLUMNS": "200", **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds)


def check_hosts(verdict: Verdict, hosts: list[Host]) -> None:
    if found := leases_of(hosts):
        verdict.break_("leases", "; ".join(found))
    if sockets := [f"{host.name}: {each}" for host in hosts for each in sockets_of(host)]:
        verdict.break_("sockets", ", ".join(sockets))


def check_failure(verdict: Verdict, run: FaultyRun, done: Launched) -> None:
    scenario, fault = run.scenario, run.scenario.fault
    texts, least = REASONS[fault.kind]
    lines = done.output.splitlines()
    verdict.reported = next((line for line in lines if line.startswith("The run failed:")), "(no report)")
    verdict.status = done.status
    path = run.run_dir / "result.json"
    if not path.is_file():
        verdict.break_("cause", f"no result.json: {done.output[-1500:]}")
        return
    result = json.loads(path.read_text())
    first: dict[str, Any] = result["first_failure"] or {}
    if first.get("name") not in scenario.names or first.get("node_rank") not in scenario.causes:
        verdict.break_("cause", f"names {first.get('name')} of node{first.get('node_rank')}: {verdict.reported}")
    if not any(text in str(first.get("reason")) for text in texts):
        verdict.break_("cause", f"reason {first.get('reason')!r}")
    outcomes = [each for node in result["nodes"] for each in node["outcomes"]]
    own = [each["returncode"] or 1 for each in outcomes if each["failed"] and not each["stopped"]]
    if done.status != (highest := max(own, default=1)) or done.status < least:
        verdict.break_("status", f"exit status {done.status}; the highest of a process is {highest}, at least {least}")
    traces = done.output.count("Traceback") - sum("Traceback" in line for line in first.get("traceback", ()))
    if fault.epoch and traces > 0 and fault.kind not in ("exception", "disk"):
        verdict.break_("traceback", f"{traces} tracebacks")


def check_restarts(verdict: Verdict, run: FaultyRun) -> None:
    fault, path = run.scenario.fault, run.run_dir / "result.json"
    restarts = json.loads(path.read_text()).get("restarts", []) if path.is_file() else []
    if len(restarts) != 1:
        verdict.break_("restarts", f"not one restart: {[each.get('text') for each in restarts] or path}")
        return
    found = restarts[0]
    verdict.reported = found["text"]
    if found["cause_node"] != fault.node or not any(text in found["reason"] for text in REASONS[fault.kind][0]):
        verdict.break_("cause", found["text"])
    if found["without"] != ([fault.node] if fault.kind in NODE_KINDS else []):
        verdict.break_("restarts", f"without {found['without']}: {found['text']}")


def check_views(verdict: Verdict, run: FaultyRun, state: str) -> None:
    shown = gnnfleet(run.environment, "status", "--json", run.run_id)
    if not shown.stdout.startswith("{"):
        verdict.break_("agrees", f"status printed {shown.stdout + shown.stderr!r}")
        return
    found = json.loads(shown.stdout)
    if found["state"] != state or shown.returncode != {"done": 0, "stopped": 130, "failed": 1}[state]:
        verdict.break_("agrees", f"status says {found['state']} and exits {shown.returncode}: {found['sentence']!r}")
    if state == "failed":
        causes = run.scenario.causes
        if not any(f"node{node}" in found["sentence"] for node in causes):
            verdict.break_("agrees", f"status names another node than {causes}: {found['sentence']!r}")
    listed = gnnfleet(run.environment, "runs", "--json", cwd=run.folder)
    rows = [row for row in json.loads(listed.stdout or "[]") if row["run_id"] == run.run_id]
    if len(rows) != 1 or rows[0]["state"] != state:
        verdict.break_("agrees", f"runs says {rows or listed.stdout[-500:] + listed.stderr}")
