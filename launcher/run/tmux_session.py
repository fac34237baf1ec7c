"""Starts and stops the tmux session of a node. tmux keeps its supervisor alive when the launcher exits.

In a Slurm job the supervisor runs in a job step instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from launcher.command import Command, render, shell_line
from launcher.config.schema import RunConfig, login_text
from launcher.errors import FleetError, SessionError, SessionExists
from launcher.node.json_records import Damaged, message_in
from launcher.plan.model import NodePlan
from launcher.report.launch_file import user_at_host
from launcher.transport.base import Completed, Transport

_TMUX_TIMEOUT = 20.0  # seconds one tmux command may take on a busy node

_STOP_SLACK = 20.0  # seconds beyond its own timeout that control.py may take to exit

#: The command of the session. $1: run folder. Errors of start.sh go to logs/start.log.
_RUN = 'mkdir -p "$1/logs" && exec bash "$1/start.sh" 2>>"$1/logs/start.log"'

#: Starts the session and waits for the supervisor. $1: run folder, $2: session, $3: timeout in seconds, $4…: arguments
#: of tmux. Exit status 0: the supervisor is running; otherwise one of the constants below, with tmux's error on stderr,
#: or the last lines of the log and a note about a full disk on stdout. `read` sleeps without starting a process: many
#: nodes may start at once on one machine.
_START = """
run=$1 session=$2 end=$((SECONDS + $3)) look=0
shift 3
say() { tail -n 20 "$run/logs/start.log" 2>/dev/null
  [ "$(stat -f -c %a "$run")" -gt 4 ] || echo "the disk of $run is full"; }
command -v tmux >/dev/null || exit 127
tmux "$@" || exit 10
exec 9<> <(:)
until [ -e "$run/state.json" ]; do
  look=$(((look + 1) % 10))
  if [ $look = 1 ] && ! tmux has-session -t "=$session" 2>/dev/null; then
    [ -e "$run/state.json" ] && exit 0
    say; exit 11
  fi
  if [ "$SECONDS" -ge "$end" ]; then say; tmux kill-session -t "=$session"; exit 12; fi
  read -r -t 0.05 -u 9
done
exit 0
"""

_NO_TMUX, _TMUX_FAILED, _ENDED, _LATE = 127, 10, 11, 12

#: Waits for a supervisor that runs without tmux. $1: run folder, $2: timeout in seconds. Exit status and output are
#: those of ``_START``; the caller sees whether the supervisor has ended.
_AWAIT = """
run=$1 end=$((SECONDS + $2))
until [ -e "$run/state.json" ]; do
  if [ "$SECONDS" -ge "$end" ]; then
    tail -n 20 "$run/logs/start.log" 2>/dev/null
    [ "$(stat -f -c %a "$run")" -gt 4 ] || echo "the disk of $run is full"
    exit 12
  fi
  sleep 0.05
done
"""

_STEP_TURN = 3.0  # seconds of one wait for a supervisor without tmux


_ABSENT = "gnnfleet: nothing of this run is here"  # printed by the node, not shown to users

#: $1: run folder, $2: command to run if the folder has a node.json.
_IF_THERE = f'if [ -e "$1/node.json" ]; then exec bash -c "$2"; else echo "{_ABSENT}"; fi'


@dataclass(frozen=True)
class StopReport:
    """How stopping a node ended."""

    node: NodePlan
    was: str  #: state of the node before, as in ``NodeView.word``; '' if unknown
    killed: tuple[str, ...] = ()  #: ``pid command`` of processes that the supervisor did not end itself
    leftovers: tuple[str, ...] = ()  #: ``pid command`` of processes that survived SIGKILL
    trouble: str = ""  #: why it could not be stopped

    @property
    def clean(self) -> bool:
        """Whether no process of the run is left on the node."""
        return not self.leftovers and not self.trouble

    @property
    def sentence(self) -> str:
        if self.trouble:
            return f"{self.node.label}: not stopped: {self.trouble}; the run may go on there. {how_to_stop(self.node)}"
        if self.leftovers:
            return f"{self.node.label}: still running after SIGKILL: {', '.join(self.leftovers)}"
        if self.was == "not started":
            return f"{self.node.label}: the run was never started there"
        if self.was in ("done", "failed", "stopped") and not self.killed:
            return f"{self.node.label}: had ended already ({self.was})"
        forced = f"; killed: {', '.join(self.killed)}" if self.killed else ""
        return f"{self.node.label}: stopped{forced}"

    def to_json(self) -> dict[str, Any]:
        values = {"node_rank": self.node.node_rank, "target": self.node.target, "was": self.was, "clean": self.clean}
        return values | {"killed": list(self.killed), "leftovers": list(self.leftovers), "trouble": self.trouble}


def start_session(transport: Transport, node: NodePlan, *, start_timeout: float) -> None:
    """Start the node's supervisor in its tmux session and wait until it runs. ``node.files`` must be on the node.

    Raises SessionError if tmux is missing, the session exists, or state.json is missing after ``start_timeout``
    seconds.
    """
    supervisor = Command(("bash", "-c", _RUN, "bash", node.run_dir))
    session = transport.start_session(node.session, supervisor)
    if session is not None:  # without tmux: the session ends if its supervisor does not run in time
        deadline = time.monotonic() + start_timeout
        while True:
            running = session.running()
            turn = min(_STEP_TURN, deadline - time.monotonic()) if running else 0.0
            waiting = ("bash", "-c", _AWAIT, "bash", node.run_dir, str(max(0, round(turn))))
            done = transport.run(Command(waiting), timeout=turn + _TMUX_TIMEOUT)
            if done.returncode == 0:
                return
            if not running or time.monotonic() >= deadline:
                break
        session.end()
        late = Completed(_LATE if running else _ENDED, done.stdout, done.stderr)
        raise SessionError(f"{node.label}: {_why_not_started(transport, node, late, start_timeout)}")
    words = ("bash", "-c", _START, "bash", node.run_dir, node.session, str(max(1, round(start_timeout))))
    # The user's login shell runs the command, and the session ends with it.
    tmux = ("new-session", "-d", "-s", node.session, "-x", "220", "-y", "50", shell_line(supervisor))
    ends = (";", "set-option", "-w", "remain-on-exit", "off", ";", "set-option", "destroy-unattached", "off")
    done = transport.run(Command((*words, *tmux, *ends)), timeout=start_timeout + 2 * _TMUX_TIMEOUT)
    if done.returncode != 0:
        exists = done.returncode == _TMUX_FAILED and b"duplicate session" in done.stderr
        kind = SessionExists if exists else SessionError
        raise kind(f"{node.label}: {_why_not_started(transport, node, done, start_timeout)}")


#: Prepares the run folder $1 of a node for a supervisor that takes part in the next restart of the run. If an earlier
#: return has failed after that, returns.json is there already.
_RETURN = """
cd "$1" || exit
[ ! -e state.json ] && [ -e returns.json ] || mv -f state.json returns.json || exit
rm -f control/stop
"""


def return_session(transport: Transport, node: NodePlan, *, start_timeout: float) -> None:
    """Start a new supervisor on a node whose supervisor has ended without a result. Raises FleetError.

    The node takes part in the next restart of the run (``run.restarts``).
    """
    done = transport.run(Command(("bash", "-c", _RETURN, "bash", node.run_dir)), timeout=_TMUX_TIMEOUT)
    if done.returncode != 0:
        raise SessionError(f"{node.label}: its run folder {node.run_dir} is gone: {_text(done.stderr)}")
    start_session(transport, node, start_timeout=start_timeout)


def _why_not_started(transport: Transport, node: NodePlan, done: Completed, start_timeout: float) -> str:
    if done.returncode == _NO_TMUX:
        return "tmux is not installed on the node; install it (apt install tmux) and launch again"
    if done.returncode == _TMUX_FAILED and b"duplicate session" in done.stderr:
        stop = f"tmux kill-session -t '={node.session}'"  # in zsh a plain =name is the path of a program
        where = "" if transport.target == "local" else f" (on {node.target})"
        return f"tmux session {node.session} exists already; end it with `{stop}`{where}, or choose another --run-id"
    if done.returncode not in (_ENDED, _LATE):
        return f"tmux could not start session {node.session}: {_text(done.stderr)}"
    late = f"the supervisor did not start within {start_timeout:g} s (run.start_timeout)"
    what = late if done.returncode == _LATE else "the supervisor ended while it started"
    return f"{what}; the end of {node.run_dir}/logs/start.log:\n{_text(done.stdout) or '(empty)'}"


def if_run_exists(node: NodePlan, program: Command) -> Command:
    """Return a command that runs ``program`` if the run folder exists on the node.

    Without the folder, the command only prints a marker, which ``run_was_absent`` detects.
    """
    return Command(("bash", "-c", _IF_THERE, "bash", node.run_dir, render(replace(program, cwd=""))))


def run_was_absent(done: Completed) -> bool:
    """Whether a command made by ``if_run_exists`` found no run folder on the node."""
    return _ABSENT.encode() in done.stdout


def stop_session(
    transport: Transport, node: NodePlan, *, timeout: float, why: str = "", now: bool = False, if_there: bool = False
) -> StopReport:
    """Stop all processes of the run on a node; they are killed after ``timeout`` seconds.

    ``why``, such as Ctrl-C, appears in the run's report, with who asks. ``now``: kill them at once. ``if_there``: the
    run may never have been sent to the node. Raises SessionError if control.py fails there.
    """
    words = ["--timeout", f"{timeout:g}", "--session", node.session, "--by", user_at_host()]
    words += [*(["--why", why] if why else []), *(["--now"] if now else [])]
    command = node.program("control", "stop", node.run_dir, *words)
    done = transport.run(if_run_exists(node, command) if if_there else command, timeout=timeout + _STOP_SLACK)
    if if_there and run_was_absent(done):
        return StopReport(node, "not started")
    printed = done.stdout.decode("utf-8", "replace").split("\n")
    try:
        answer = [message for message in map(message_in, printed) if message and "stopped" in message][-1]
    except (Damaged, IndexError) as error:
        damage = str(error) if isinstance(error, Damaged) else ""
        reason = _text(done.stderr) or damage or f"exit status {done.returncode}"
        raise SessionError(f"{node.label}: could not stop the run on this node: {reason}") from None
    killed, leftovers = (
        tuple(f"{process['pid']} {process['command']}" for process in answer[name]) for name in ("killed", "leftovers")
    )
    return StopReport(node, answer.get("was", ""), killed, leftovers)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()


STOP_EXTRA = 10.0  #: seconds beyond run.grace that a node may take to stop before its processes are killed


def stop_node(node: NodePlan, transport: Transport, limits: RunConfig, why: str = "") -> str:
    """Stop one node, reconnecting first if needed; return '', or a note about processes that may still run."""
    try:
        transport.connect(limits.connect_timeout)
        report = stop_session(transport, node, timeout=limits.grace + STOP_EXTRA, why=why)
    except FleetError as error:
        return f"{error}; its processes may still run. {how_to_stop(node)}"
    if report.leftovers:
        return f"{node.label}: still running: {', '.join(report.leftovers)}"
    return ""


def how_to_stop(node: NodePlan) -> str:
    command = f"tmux kill-session -t '={node.session}'"  # without =, tmux matches prefixes of names
    if node.slurm_job:
        return f"To stop its processes: scancel {node.slurm_job}"
    if node.login is None:
        return f"To stop its processes: {command}"
    port = f"-p {node.login.port} " if node.login.port else ""
    words = port + login_text(node.login.user, node.login.host, None)  # ssh does not accept IPv6 addresses in brackets
    return f'To stop its processes: ssh {words} "{command}"'
