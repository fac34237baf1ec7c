"""Starts, watches and stops the tmux session of a node, in which its supervisor runs.

tmux keeps the supervisor alive when the launcher goes away, and lets a person attach to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from launcher.command import Command, quote
from launcher.config.schema import login_text
from launcher.errors import FleetError, SessionError
from launcher.node.json_reader import Damaged, message_in
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.ending import Limits
from launcher.report.run_folder import user_at_host
from launcher.transport.base import Completed, Transport

_TMUX_TIMEOUT = 20.0  # seconds one tmux command may take on a busy node

_STOP_SLACK = 20.0  # seconds beyond the timeout in which control.py ends by itself

#: $1 run folder. What the session runs; what start.sh complains about stays readable afterwards.
_RUN = 'mkdir -p "$1/logs" && exec bash "$1/start.sh" 2>>"$1/logs/start.log"'

#: $1 run folder, $2 session, $3 seconds, $4… tmux's arguments. Exit 0: the supervisor is up; else one of _START_ENDS,
#: with tmux's complaint on stderr, or the log's last lines on stdout and whether a full disk is what kept it from
#: saying more. `read` is a sleep that starts no process: many nodes may start at once on one machine.
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

_NO_TMUX, _REFUSED, _ENDED, _LATE = 127, 10, 11, 12


@dataclass(frozen=True)
class StopReport:
    """What stopping one node took."""

    stopped: bool  #: nothing of the run is left on the node
    killed: tuple[str, ...]  #: ``pid command`` of processes the supervisor did not end itself
    leftovers: tuple[str, ...]  #: ``pid command`` of processes that outlived SIGKILL


def new_session_argv(node: NodePlan) -> tuple[str, ...]:
    """tmux's arguments: a session that ends with its command, whatever the user's tmux.conf says."""
    command = " ".join(quote(word) for word in ("bash", "-c", _RUN, "bash", node.run_dir))
    start = ("new-session", "-d", "-s", node.session, "-x", "220", "-y", "50", command)
    return (*start, ";", "set-option", "-w", "remain-on-exit", "off", ";", "set-option", "destroy-unattached", "off")


def start_session(transport: Transport, node: NodePlan, *, start_timeout: float) -> None:
    """Start the node's supervisor in its tmux session and wait until it is up.

    The files of ``node.files`` must be in place. Raises SessionError when tmux is missing, the session
    exists already, or no supervisor has come up after ``start_timeout`` seconds.
    """
    words = ("bash", "-c", _START, "bash", node.run_dir, node.session, str(max(1, round(start_timeout))))
    done = transport.run(Command((*words, *new_session_argv(node))), timeout=start_timeout + 2 * _TMUX_TIMEOUT)
    if done.returncode != 0:
        raise SessionError(f"{node.label}: {_why_not_started(transport, node, done, start_timeout)}")


def _why_not_started(transport: Transport, node: NodePlan, done: Completed, start_timeout: float) -> str:
    if done.returncode == _NO_TMUX:
        return "tmux is not installed there; install it (apt install tmux) and launch again"
    if done.returncode == _REFUSED and b"duplicate session" in done.stderr:
        return _already(transport, node)
    if done.returncode not in (_ENDED, _LATE):
        return f"tmux could not start session {node.session}: {_text(done.stderr)}"
    late = f"the supervisor was not up after {start_timeout:g} s (run.start_timeout)"
    what = late if done.returncode == _LATE else "the supervisor ended before it was up"
    return f"{what}; {node.run_dir}/logs/start.log says:\n{_text(done.stdout) or '(nothing)'}"


def stop_session(transport: Transport, node: NodePlan, *, timeout: float, by: str = "", why: str = "") -> StopReport:
    """Stop everything of the run on one node; force is used after ``timeout`` seconds.

    ``by`` and ``why`` are told to the whole run: who asks, as alice@laptop, and by what, as Ctrl-C. Raises
    SessionError when the node's own stop program does not answer.
    """
    options = ["--timeout", f"{timeout:g}", "--session", node.session]
    options += [word for name, value in (("--by", by), ("--why", why)) if value for word in (name, value)]
    done = transport.run(node.program("control", "stop", node.run_dir, *options), timeout=timeout + _STOP_SLACK)
    return stop_report(done, node)


def stop_report(done: Completed, node: NodePlan) -> StopReport:
    """What control.py has answered to ``stop``; raises SessionError when that is no answer."""
    said = done.stdout.decode("utf-8", "replace").split("\n")
    try:
        answers = [message for message in map(message_in, said) if message and "stopped" in message]
        answer = answers[-1]
    except (Damaged, IndexError) as error:
        damage = str(error) if isinstance(error, Damaged) else ""
        reason = _text(done.stderr) or damage or f"exit status {done.returncode}"
        raise SessionError(f"{node.label}: could not stop the run there: {reason}") from None
    killed, leftovers = (
        tuple(f"{process['pid']} {process['command']}" for process in answer[name]) for name in ("killed", "leftovers")
    )
    return StopReport(answer["stopped"] is True, killed, leftovers)


def watch_command(node: NodePlan, offsets: dict[str, int], *, tail: int | None = None) -> Command:
    """``watch.py``: metrics, events and logs of ranks, going on from ``offsets`` (file -> byte), but with the last
    ``tail`` lines of each at most."""
    words = ["--offsets", json.dumps(offsets), "--only", "*.jsonl,logs/rank*.log"]
    words += ["--tail", str(tail)] if tail is not None else []
    return node.program("watch", node.run_dir, *words)


def _already(transport: Transport, node: NodePlan) -> str:
    stop = f"tmux kill-session -t {quote('=' + node.session)}"
    over = "" if transport.target == "local" else f" (on {node.target})"
    return f"tmux session {node.session} exists already; end it with `{stop}`{over}, or take another --run-id"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()


STOP_EXTRA = 10.0  #: seconds a node may take to stop beyond its grace, before force


def stop_node(node: NodePlan, transport: Transport, limits: Limits, why: str = "") -> str:
    """Stop one node, getting its line back first if need be; what may still run there, or ''."""
    try:
        transport.connect(limits.connect_timeout)
        report: StopReport = stop_session(
            transport, node, timeout=limits.grace + STOP_EXTRA, by=user_at_host(), why=why
        )
    except FleetError as error:
        return f"{error}; its processes may still run. {how_to_stop(node)}"
    if not report.stopped:
        return f"{node.label}: still running: {', '.join(report.leftovers)}"
    return ""


def how_to_stop(node: NodePlan) -> str:
    """What a person types to stop this node by hand."""
    line = f"tmux kill-session -t '={node.session}'"  # without =, tmux takes a name that merely begins so
    if node.login is None:
        return f"To stop them: {line}"
    port = f"-p {node.login.port} " if node.login.port else ""
    words = port + login_text(node.login.user, node.login.host, None)  # ssh takes no brackets
    return f'To stop them: ssh {words} "{line}"'


def stops_itself(plan: LaunchPlan, node: NodePlan) -> str:
    """What becomes of a node that nobody reaches."""
    itself = "it stops by itself where it does not reach the others" if len(plan.nodes) > 1 else "it may still run"
    return f"{itself}. {how_to_stop(node)}"
