"""Tests of supervisors on nodes with slow disks, stopped terminals, processes of other users, or unusual locales."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.node import procs
from launcher.node.child_process import Loop, outcome
from launcher.node.diagnostics.vitals import LineTail
from launcher.node.log_lines import LineLog
from launcher.node.record import append_json
from launcher.node.regular_file import open_regular
from launcher.node.supervisor.journal import Journal, LatestWriter
from launcher.node.supervisor.outcomes import Mailbox, OutcomeBook, write_or_mail
from node_kit import ROOT
from peers_kit import Run
from waiting import wait_until


@pytest.fixture
def loop() -> Iterator[Loop]:
    old = signal.getsignal(signal.SIGCHLD)
    yield Loop()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, old)


@pytest.mark.parametrize(
    ("lease", "use", "added"),
    [
        (fcntl.F_WRLCK, lambda path: open_regular(path).read(), ""),
        (fcntl.F_WRLCK, lambda path: next(LineTail(path).lines()), ""),
        (fcntl.F_RDLCK, lambda path: append_json(path, {"kind": "step"}), '{"kind": "step"}\n'),
        (fcntl.F_RDLCK, lambda path: LineLog(path).close(), ""),
    ],
)
def test_a_file_that_an_nfs_server_has_delegated_to_a_client_is_opened(
    tmp_path: Path, lease: int, use: Callable[[str], Any], added: str
) -> None:
    path = tmp_path / "metrics-rank0.jsonl"
    path.write_text('{"kind": "start"}\n')
    holder = os.open(path, os.O_RDWR if lease == fcntl.F_WRLCK else os.O_RDONLY)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel asks for the lease
    client = threading.Timer(0.2, lambda: fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK))
    fcntl.fcntl(holder, fcntl.F_SETLEASE, lease)
    client.start()
    try:
        read = use(str(path))
        assert lease == fcntl.F_RDLCK or "start" in str(read)
        assert path.read_text() == '{"kind": "start"}\n' + added
    finally:
        client.join()
        signal.signal(signal.SIGIO, before)
        os.close(holder)


@pytest.mark.slow
def test_a_stalled_disk_does_not_end_the_run(tmp_path: Path) -> None:
    # On one node, writing state.json blocks, as on a stalled disk; the hub must still receive heartbeats of this node.
    run = Run(tmp_path, 2)
    try:
        run.start()
        supervisor = run.nodes[1].supervisor
        assert supervisor is not None
        state = run.nodes[1].path / "state.json"
        stalled = Path(f"{state}.{supervisor.pid}.tmp")
        wait_until(lambda: not stalled.exists() and mkfifo(stalled))
        until = time.monotonic() + 4.5  # peer_timeout is 3 s
        while time.monotonic() < until:
            assert run.nodes[0].json("state.json")["peers"]["1"]["state"] == "training"
            time.sleep(0.2)
        assert time.time() - state.stat().st_mtime > 3
        with open(stalled, "rb"):  # the disk responds again
            wait_until(lambda: time.time() - state.lstat().st_mtime < 2 and not stalled.exists())
        since = time.monotonic()
        (run.nodes[1].path / "control" / "stop").touch()
        assert [result["state"] for result in run.ends(since)] == ["stopped", "stopped"]
    finally:
        run.kill()


def mkfifo(path: Path) -> bool:
    try:
        os.mkfifo(path)
    except FileExistsError:
        return False
    return True


def test_the_latest_text_is_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    latest = LatestWriter(str(path))
    for number in range(200):
        latest.put(str(number))
    assert latest.settle(5) and path.read_text() == "199" and latest.failed() is None
    shutil.rmtree(tmp_path)
    latest.put("200")
    assert latest.settle(5)
    error = latest.failed()
    assert error is not None and error.errno == errno.ENOENT and latest.failed() is None


def test_ctrl_s_in_the_session_does_not_block_the_supervisor(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        journal = Journal(str(tmp_path), 0)
        journal.log("begun")
        while not (tmp_path / "go").exists():
            time.sleep(0.02)
        for _ in range(2000):
            journal.log("x" * 80)
        (tmp_path / "went").touch()
        os._exit(0)
    try:
        assert b"begun" in os.read(terminal, 100)
        os.write(terminal, b"\x13")
        time.sleep(0.1)
        (tmp_path / "go").touch()
        wait_until((tmp_path / "went").exists, 5)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_characters_the_terminal_cannot_encode_are_replaced(tmp_path: Path) -> None:
    code = f"from launcher.node.supervisor.journal import Journal; Journal({str(tmp_path)!r}, 0).log('a → b \\udcff')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "iso-8859-1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, "a → b ?\n")
    assert (tmp_path / "logs" / "supervisor.log").read_text().endswith(" a → b ?\n")


def test_events_are_logged_as_text(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), 0)
    finding = {"t": 1.0, "kind": "stall", "node_rank": 0, "rank": None, "text": "no process has trained"}
    journal.event("finding", finding=finding)
    journal.event("end", state="failed", why="", cause=finding, lost={"1": 2.0})
    lines = [line.partition(" ")[2] for line in (tmp_path / "logs/supervisor.log").read_text().splitlines()]
    cause = "stall: no process has trained"
    assert lines == [f"finding {cause}", f'end state=failed cause={cause} lost={{"1": 2.0}}']


def test_an_io_error_does_not_count_as_a_deleted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(str(tmp_path / "run"), 0)

    def fails(path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        assert journal.folder_exists()
    shutil.rmtree(tmp_path / "run")
    assert not journal.folder_exists()


HOSTILE_MAIL = (
    b"", b"\xff\xfe", b"[7]", b"{}", b"null", b"NaN", b'"text"', b"[" * 60_000, b'{"rank":' * 9_000, b"9" * 9_000,
    b'{"rank": 1e999}', b'{"rank": null, "runner": {}}', b'{"rank": 0, "trouble": []}', b'{"rank": [0]}',
    b'{"rank": 0, "runner": {"pid": -1, "start_ticks": "x"}}',
    b'{"rank": -1}', b'{"rank": 99999999999999999999999}', b"{" + b'"rank": 0, ' * 9_000 + b'"rank": {}}',
)  # fmt: skip


def test_hostile_records_do_not_end_the_supervisor(tmp_path: Path, loop: Loop) -> None:
    journal = Journal(str(tmp_path), 0)
    book = OutcomeBook(journal, 0, (0,))
    mailbox = Mailbox(loop, book)
    with socket.socket(fileno=os.dup(mailbox.sender)) as sock:
        assert not sock.getpeername()  # no name at which other users could send
    for data in HOSTILE_MAIL:
        os.write(mailbox.sender, data)
        loop.poll(1.0)
    sound = outcome("rank0", 0, 0, returncode=3, signal="SIGFUTURE", ended=1.0)
    write_or_mail(str(tmp_path / "missing" / "rank0.json"), sound, mailbox.sender)
    loop.poll(1.0)
    mailbox.close()
    assert book.outcomes["rank0"]["returncode"] == 3
    assert (tmp_path / "logs" / "supervisor.log").read_text().count("ignored a malformed record") == 1


def test_a_record_for_a_supervisor_that_has_ended_is_only_mentioned(tmp_path: Path, loop: Loop, capsys: Any) -> None:
    mailbox = Mailbox(loop, OutcomeBook(Journal(str(tmp_path), 0), 0, (0,)))
    sender = os.dup(mailbox.sender)
    mailbox.close()
    for number in (sender, None):
        write_or_mail(str(tmp_path / "missing" / "rank0.json"), {"rank": 0}, number)
    os.close(sender)
    assert capsys.readouterr().out.count("cannot send the record") == 2


def test_the_tail_of_a_log_shortens_long_lines(tmp_path: Path) -> None:
    log = LineLog(str(tmp_path / "log"))
    log.feed(b"y" * 50_000 + b"\nlast words\n")
    log.close()
    assert list(log.tail) == ["y" * 2000 + "…", "last words"]
    assert len((tmp_path / "log").read_bytes()) > 50_000


def test_a_process_of_another_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # A user script may have started a process with sudo: it belongs to the run, but the user may not kill it.
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    other = procs.look(os.getppid())
    assert other is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuse)
        patch.setattr(os, "killpg", refuse)
        assert procs.end(lambda: [other], -4.9) == [other]
        procs.send_group(other.pgid, signal.SIGKILL)


@pytest.mark.cluster
def test_processes_of_other_users_hidden_by_hidepid() -> None:
    # If /proc is mounted with hidepid=1, it lists processes of other users but hides their details.
    if os.getuid() != 0:
        pytest.skip("needs root, to mount /proc anew")
    code = (
        "import os; from launcher.node import procs; "
        "print([one.pid == os.getpid() for one in procs.table()], len(procs.ancestors(os.getpid())), procs.look(1))"
    )
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", sys.executable, "-c", code]
    script = 'mount -t proc -o hidepid=1 proc /proc; "$@"; exit'
    command = ["unshare", "-mpf", "sh", "-c", script, "sh", *nobody]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert (done.stdout, done.stderr) == ("[True] 1 None\n", "")
