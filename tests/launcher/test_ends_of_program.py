"""Tests of the exit of ``gnnfleet``: the terminal is restored, no partial file stays, and nothing delays the exit."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_kit import ROOT
from operate_kit import LocalRun
from waiting import stretched

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
CLI = "from launcher.cli.main import main; main()"


def program(code: str, *words: str, terminal: int | None = None, **env: str) -> subprocess.Popen[bytes]:
    given = subprocess.PIPE if terminal is None else terminal
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=given,
        stdout=given,
        stderr=given,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **env},
        start_new_session=True,
    )


def read_until(stream: int, text: bytes, seconds: float = 15.0) -> bytes:
    output, deadline = b"", time.monotonic() + seconds
    while text not in output:
        assert select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0], output
        output += os.read(stream, 65536)
    return output


@pytest.fixture
def silent_host() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_status_watch_shows_the_cursor_again_when_a_signal_ends_it(tmp_path: Path, number: int) -> None:
    made = LocalRun(tmp_path).launched("sync", alive=True)  # this process is the launcher, so the run counts as alive
    near, far = pty.openpty()
    process = program(CLI, "status", "--watch", str(made.folder), terminal=far, XDG_STATE_HOME=str(tmp_path / "state"))
    os.close(far)
    assert HIDE in read_until(near, b"run folder")
    process.send_signal(number)
    read_until(near, SHOW)
    assert process.wait(10) == 128 + number
    os.close(near)


def test_ctrl_c_does_not_wait_for_a_silent_host(tmp_path: Path, silent_host: int) -> None:
    config = tmp_path / "cluster.yml"
    config.write_text(
        f"nodes: [{{host: 127.0.0.1, port: {silent_host}, user: me}}]\ndata: {{dataset: synthetic}}\n"
        "run: {connect_timeout: 60}\n"
    )
    process = program(CLI, "check", "--config", str(config), HOME=str(tmp_path))
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(20) == 130 and time.monotonic() - began < stretched(5)


def test_an_unfinished_file_of_a_thread_is_removed(tmp_path: Path) -> None:
    code = (
        "import sys, threading, time; from pathlib import Path; from launcher.files import atomic_file\n"
        "def write():\n    with atomic_file(Path(sys.argv[1]) / 'log') as out:\n"
        "        out.write(b'x'); time.sleep(60)\n"
        "threading.Thread(target=write, daemon=True).start(); time.sleep(0.3)"
    )
    process = program(code, str(tmp_path))
    assert process.wait(10) == 0
    assert list(tmp_path.iterdir()) == []
