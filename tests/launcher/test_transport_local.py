"""Tests of what every transport must do: the local, the paramiko and the OpenSSH transport."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.command import Command
from launcher.errors import CommandTimeout, RemoteFileError, TransportError
from launcher.transport import process
from launcher.transport.base import Completed, Transport
from launcher.transport.local import LocalTransport
from sshd_inprocess import Sshd, serving
from transport_kit import know, new_key, openssh_to, save_key, sh, ssh_threads, ssh_to
from waiting import runs, stretched, wait_until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


no_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="openssh-client is not installed")


@pytest.fixture(params=["local", "ssh", pytest.param("openssh", marks=no_ssh)])
def node(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Iterator[Transport]:
    if request.param == "local":
        yield LocalTransport(3)
        return
    client, host = new_key(), new_key()
    with serving(Sshd(home=home, host_key=host, authorized=client)) as sshd:
        know(home, sshd.port, host)
        key = save_key(client, tmp_path / "id")
        transport = ssh_to(sshd, key=key) if request.param == "ssh" else openssh_to(sshd, key=key)
        transport.connect(10)
        yield transport
        transport.close()
    assert ssh_threads() == []


def test_a_command_returns_status_and_both_outputs(node: Transport) -> None:
    done = node.run(sh("echo out; echo err >&2; exit 7"), timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_environment_and_quoting(node: Transport, home: Path) -> None:
    (home / "a b").mkdir()
    command = Command(
        ("sh", "-c", 'printf "%s|" "$PWD" "$X" "$Y" "$1"', "sh", "it's $HOME"),
        env={"X": "$(id) 'q'"},
        cwd="~/a b",
        setup=("export Y=fromsetup",),
    )
    expected = f"{home}/a b|$(id) 'q'|fromsetup|it's $HOME|"
    assert node.run(command, timeout=10).stdout.decode() == expected


def test_commands_start_in_the_login_folder(node: Transport, home: Path) -> None:
    assert node.run(Command(("pwd",)), timeout=10).stdout.decode().strip() == str(home)


def test_stdin_and_stdout_larger_than_any_window(node: Transport) -> None:
    data = os.urandom(1 << 20) * 6
    assert node.run(Command(("cat",)), stdin=data, timeout=60).stdout == data


def test_much_output_on_stdout_and_stderr_does_not_deadlock(node: Transport) -> None:
    done = node.run(sh("head -c 5000000 /dev/zero >&2; head -c 5000000 /dev/zero"), timeout=60)
    assert (len(done.stdout), len(done.stderr)) == (5_000_000, 5_000_000)


def test_a_command_that_ignores_its_stdin(node: Transport) -> None:
    assert node.run(Command(("true",)), stdin=b"x" * 5_000_000, timeout=20).returncode == 0


def test_death_by_signal_is_a_negative_status(node: Transport) -> None:
    assert node.run(sh("kill -9 $$"), timeout=10).returncode < 0


def test_timeout_ends_the_command(node: Transport, home: Path) -> None:
    started = time.monotonic()
    with pytest.raises(CommandTimeout, match="node3.*did not end within 0.5 s"):
        node.run(sh("echo $$ > pid; sleep 60"), timeout=0.5)
    assert time.monotonic() - started < stretched(5)
    assert_gone(home / "pid")


def test_stream_passes_lines_on_as_they_arrive(node: Transport) -> None:
    times: list[float] = []
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        times.append(time.monotonic())

    script = "echo one; sleep 0.5; printf 'two\\nthr'; sleep 0.1; printf 'ee\\nno newline'; exit 4"
    assert node.stream(sh(script), on_line, threading.Event()) == 4
    assert lines == ["one", "two", "three"]  # an unterminated last line may be incomplete
    assert times[1] - times[0] > 0.3


def test_stop_ends_a_stream_and_its_command_at_once(node: Transport, home: Path) -> None:
    stop = threading.Event()
    seen = threading.Event()
    script = "sleep 61 & echo $! > pid; echo go; wait"
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(node.stream, sh(script), lambda line: seen.set(), stop)
        assert seen.wait(10)
        asked = time.monotonic()
        stop.set()
        assert result.result(10) == -1
        assert time.monotonic() - asked < stretched(3)
    assert_gone(home / "pid")


def test_the_stdin_of_a_streamed_command_ends_when_the_stream_stops(node: Transport) -> None:
    stop = threading.Event()
    lines: list[str] = []
    threading.Timer(0.5, stop.set).start()
    assert node.stream(sh("cat; echo end"), lines.append, stop) == -1
    assert lines == []


def test_an_error_in_the_callback_is_raised_unchanged(node: Transport) -> None:
    def on_line(line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "my terminal")

    with pytest.raises(BrokenPipeError, match="my terminal"):
        node.stream(sh("echo x; sleep 60"), on_line, threading.Event())


def test_many_commands_at_once(node: Transport) -> None:
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda i: node.run(sh(f"sleep 0.05; echo {i}"), timeout=30).stdout, range(32)))
    assert results == [f"{i}\n".encode() for i in range(32)]


def test_upload_makes_folders_and_reports_bytes(node: Transport, home: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3_000_000))
    moved: list[int] = []
    node.upload(source, "~/deep/er/file", on_bytes=moved.append)
    assert (home / "deep/er/file").read_bytes() == source.read_bytes()
    assert sum(moved) == 3_000_000


def test_upload_resumes_at_an_offset(node: Transport, home: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(200_000))
    (home / "file").write_bytes(source.read_bytes()[:70_000])
    moved: list[int] = []
    node.upload(source, str(home / "file"), offset=70_000, on_bytes=moved.append)
    assert (home / "file").read_bytes() == source.read_bytes()
    assert sum(moved) == 130_000


def test_upload_over_a_longer_file_truncates_it(node: Transport, home: Path, tmp_path: Path) -> None:
    (home / "file").write_bytes(b"x" * 100)
    (tmp_path / "source").write_bytes(b"new")
    node.upload(tmp_path / "source", "~/file")
    assert (home / "file").read_bytes() == b"new"


def test_write_is_atomic_and_private_and_leaves_no_temporary_file(node: Transport, home: Path) -> None:
    node.write(b"old", "~/dir/secret", mode=0o600)
    node.write(b"new", "~/dir/secret", mode=0o600)
    assert [path.name for path in (home / "dir").iterdir()] == ["secret"]
    assert (home / "dir/secret").read_bytes() == b"new"
    assert stat.S_IMODE((home / "dir/secret").stat().st_mode) == 0o600


def test_download(node: Transport, home: Path, tmp_path: Path) -> None:
    (home / "log").write_bytes(os.urandom(2_500_000))
    moved: list[int] = []
    node.download("~/log", tmp_path / "new/log", on_bytes=moved.append)
    assert (tmp_path / "new/log").read_bytes() == (home / "log").read_bytes()
    assert sum(moved) == 2_500_000
    node.download("~/log", tmp_path / "first", most=100_000)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "new/log").read_bytes()[:100_000]


def test_a_missing_file_is_named(node: Transport, tmp_path: Path) -> None:
    with pytest.raises(RemoteFileError, match="node3.*cannot read .*nothere") as caught:
        node.download("~/nothere", tmp_path / "nothere")
    assert caught.value.errno == errno.ENOENT
    assert list(tmp_path.glob("*nothere*")) == []


def test_a_file_in_place_of_a_folder_is_named(node: Transport, home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(RemoteFileError, match="cannot write .*file"):
        node.write(b"", "~/file/below")
    assert node.run(Command(("true",)), timeout=10).returncode == 0


def test_a_missing_source_is_a_local_error(node: Transport, home: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        node.upload(tmp_path / "nothere", "~/dest")
    assert not (home / "dest").exists()


def test_close_twice_and_open_again(node: Transport) -> None:
    node.close()
    node.close()
    node.connect(10)
    assert node.run(Command(("true",)), timeout=10).returncode == 0


def assert_gone(pid_file: Path) -> None:
    """Assert that the process whose pid is in ``pid_file`` ends within two seconds."""
    pid = int(pid_file.read_text())
    wait_until(lambda: not runs(pid), 2)


# -- conversations (``talk``) ----------------------------------------------

TWICE = sh('while read -r line; do echo "$line$line"; done; echo over >&2; exit 5')


def test_a_talk_answers_line_by_line(node: Transport) -> None:
    with node.talk(TWICE) as talk:
        for word in ("a", "ü", "c" * 100_000):
            talk.send(word)
            assert talk.receive(10) == word * 2


def test_a_talk_that_ends_has_status_and_stderr(node: Transport) -> None:
    with node.talk(sh("echo last; echo why >&2; exit 7")) as talk:
        assert (talk.receive(10), talk.receive(10), talk.receive(10)) == ("last", None, None)
        assert talk.ended() == Completed(7, b"", b"why\n")
        with pytest.raises(TransportError, match="`sh` has ended"):
            for _ in range(100):
                talk.send("anybody?")
                time.sleep(0.01)


def test_an_unterminated_line_is_dropped(node: Transport) -> None:
    # A session that is killed while it prints a long line ends with part of a line; the transport drops that part.
    script = 'printf \'whole\\n{"text": "cut\'; kill -9 $$'
    lines: list[str] = []
    assert node.stream(sh(script), lines.append, threading.Event()) < 0
    with node.talk(sh(script)) as talk:
        assert (talk.receive(10), talk.receive(10)) == ("whole", None)
    assert lines == ["whole"]


def test_a_talk_can_go_on_after_a_timeout(node: Transport) -> None:
    with node.talk(sh("read -r x; echo got $x; cat")) as talk:
        with pytest.raises(CommandTimeout, match="`sh` did not answer within 0.2 s"):
            talk.receive(0.2)
        talk.send("it")
        assert talk.receive(10) == "got it"


def test_leaving_a_talk_ends_its_command(node: Transport, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_WAIT", 0.1)
    with node.talk(sh("trap 'touch ended; exit' TERM; echo $$; while :; do sleep 0.05; done")) as talk:
        pid = int(talk.receive(10) or 0)
    wait_until(lambda: not runs(pid), 5)
    assert (home / "ended").exists()
