"""Tests of leases on devices and ports: conflicts, processes that end, damaged files and other users."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.node import leases as lease
from launcher.node.leases import LeaseError, describe, held, release, take, this_process

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
PROGRAM = Path(lease.__file__)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # pytest's temporary folders are closed to other users
    with tempfile.TemporaryDirectory(prefix="gf-leases-", dir="/tmp") as parent:
        os.chmod(parent, 0o711)
        path = Path(parent) / "leases"
        monkeypatch.setenv("GNNFLEET_LEASES", str(path))
        yield path


class Other:
    def __init__(self, run_id: str, resources: Sequence[str]) -> None:
        code = "import sys, time; from launcher.node.leases import *\n"
        code += f"print(len(take({list(resources)!r}, this_process({run_id!r}, 0, 'bob@desk'))), flush=True)\n"
        code += "time.sleep(60)"
        self.process = subprocess.Popen([sys.executable, "-c", code], cwd=PROGRAM.parents[2], stdout=subprocess.PIPE)
        assert self.process.stdout
        self.conflicts = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def other() -> Iterator[Callable[..., Other]]:
    made: list[Other] = []

    def make(run_id: str, *resources: str) -> Other:
        made.append(Other(run_id, resources))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def names(leases: Sequence[lease.Lease]) -> list[tuple[str, str]]:
    return [(one.resource, one.run_id) for one in leases]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def as_user(uid: int, work: Callable[[], object]) -> str:
    """Call ``work`` in a child process as user ``uid``. Return the repr of the result, or the exception as text."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            outcome = repr(work())
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome


def test_leases_are_taken_held_and_released(folder: Path) -> None:
    assert held() == [] and not folder.exists()
    before = time.time()
    assert take(["cuda:0", "cuda:2", "port:29500"], this_process("run-a", 1, "alice@laptop")) == []
    assert names(held()) == [("cuda:0", "run-a"), ("cuda:2", "run-a"), ("port:29500", "run-a")]
    (one,) = held(["cuda:2", "cuda:7"])
    assert (one.pid, one.node_rank, one.host) == (os.getpid(), 1, "alice@laptop") and before <= one.since <= time.time()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    release("run-a", 1)
    assert held() == [] and list(folder.iterdir()) == []


def test_after_a_conflict_no_lease_is_taken(other: Callable[..., Other]) -> None:
    theirs = other("run-b", "cuda:1", "port:29600")
    conflicts = take(["cuda:0", "cuda:1", "port:29600"], this_process("run-a", 0))
    assert names(conflicts) == [("cuda:1", "run-b"), ("port:29600", "run-b")]
    assert conflicts[0].pid == theirs.process.pid
    assert names(held()) == names(conflicts)
    assert other("run-c", "cuda:1").conflicts == 1


def test_descriptions_of_leases() -> None:
    one = lease.Lease("cuda:0", "toy-1", 0, "alice", 123, 1, "boot", 1795262591.0, "alice@laptop")
    assert describe(one) == "held by run toy-1 of alice since 2026-11-21 12:03:11 UTC (pid 123)"
    shared = one._replace(user="ubuntu")
    assert describe(shared) == "held by run toy-1 of ubuntu (alice@laptop) since 2026-11-21 12:03:11 UTC (pid 123)"
    assert [lease.resource_label(name) for name in ("cuda:0", "port:29500")] == ["CUDA device 0", "port 29500"]


def test_taking_a_lease_twice_changes_nothing() -> None:
    me = this_process("run-a", 0)
    assert take(["cuda:0"], me) == [] == take(["cuda:0", "cuda:1"], me)
    assert names(take(["cuda:0"], this_process("run-a", 1))) == [("cuda:0", "run-a")]


def test_release_ends_only_leases_of_its_own_run_and_node() -> None:
    for run_id, node_rank, name in (("a", 0, "cuda:0"), ("a", 1, "cuda:1"), ("b", 0, "cuda:2")):
        take([name], this_process(run_id, node_rank))
    release("a", 0)
    assert names(held()) == [("cuda:1", "a"), ("cuda:2", "b")]
    release("a", 7)
    assert len(held()) == 2


def test_leases_end_with_their_process(folder: Path, other: Callable[..., Other]) -> None:
    theirs = other("run-b", "cuda:0")
    assert names(held()) == [("cuda:0", "run-b")]
    theirs.process.send_signal(signal.SIGSTOP)
    assert names(held()) == [("cuda:0", "run-b")]
    theirs.kill()
    assert held() == [] and list(folder.iterdir()) == []
    assert take(["cuda:0"], this_process("run-a", 0)) == []


@pytest.mark.parametrize("change", [{"boot_id": "before"}, {"start_ticks": 1}, {"pid": 2**22 + 1}], ids=str)
def test_a_reboot_or_a_reused_pid_ends_a_lease(folder: Path, change: dict[str, Any]) -> None:
    take(["cuda:0"], this_process("run-a", 0))
    edit(next(folder.iterdir()), **change)
    assert take(["cuda:0"], this_process("run-b", 0)) == []
    assert names(held()) == [("cuda:0", "run-b")]


def test_a_zombie_holds_nothing(other: Callable[..., Other]) -> None:
    theirs = other("run-b", "cuda:0")
    os.kill(theirs.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, theirs.process.pid, os.WEXITED | os.WNOWAIT)
    assert held() == []


#: In each of 50 rounds, two processes try to take the same leases at the same moment; the process that gets the leases
#: keeps them until both have tried. A program of its own, because to fork the large process of the tests is slow.
RACE = """
import os
from launcher.node.leases import held, take, this_process
for turn in range(50):
    (start, starter), (tell, teller), (end, ender) = os.pipe(), os.pipe(), os.pipe()
    children = []
    for me in range(2):
        if not (child := os.fork()):
            os.close(starter)
            os.close(ender)
            os.read(start, 1)
            conflicts = take(["cuda:0", "cuda:1"][:: 1 - 2 * me], this_process(f"turn{turn}-{me}", 0))
            os.write(teller, b"lost " if conflicts else b"won  ")
            os.read(end, 1)
            os._exit(0)
        children.append(child)
    os.close(starter)
    assert sorted([os.read(tell, 5), os.read(tell, 5)]) == [b"lost ", b"won  "]
    assert [one.run_id[:-2] for one in held()] == [f"turn{turn}"] * 2
    for descriptor in (start, tell, teller, end, ender):
        os.close(descriptor)
    for child in children:
        os.waitpid(child, 0)
assert held() == []
"""


def test_exactly_one_of_two_concurrent_processes_gets_the_leases() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], cwd=PROGRAM.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_damaged_and_foreign_files_are_ignored(folder: Path) -> None:
    take(["cuda:0", "cuda:1", "cuda:2", "cuda:3"], this_process("run-a", 0))
    uid = os.geteuid()
    edit(folder / f"cuda-0.{uid}.json", run_id="\x1b[2Jhello")
    (folder / f"cuda-1.{uid}.json").write_text("{" * 100_000)
    edit(folder / f"cuda-2.{uid}.json", since="now")
    (folder / "README").write_text("mine")
    os.mkfifo(folder / f"cuda-9.{uid}.json")
    assert names(held()) == [("cuda:3", "run-a")]
    assert sorted(file.name for file in folder.iterdir()) == ["README", f"cuda-3.{uid}.json"]


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    take([], this_process("run-a", 0))
    (folder / f"cuda-0.{os.geteuid()}.json").symlink_to(precious)
    assert take(["cuda:0"], this_process("run-a", 0)) == []
    assert precious.read_text() == "keep" and names(held()) == [("cuda:0", "run-a")]


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path)
    for work in (held, lambda: take(["cuda:0"], this_process("run-a", 0)), lambda: release("run-a", 0)):
        with pytest.raises(LeaseError) as caught:
            work()
        assert str(caught.value) == f"{folder}, the folder of leases on devices and ports, is not a folder; remove it"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take(["cuda:5"], this_process("run-b", 0))
    real, writes = lease._write, iter([False, True])

    def full(directory: int, name: str, content: bytes) -> None:
        real(directory, name, content)
        if next(writes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lease, "_write", full)
    with pytest.raises(LeaseError, match=f"{folder}: No space left on device"):
        take(["cuda:0", "cuda:1"], this_process("run-a", 0))
    assert names(held()) == [("cuda:5", "run-b")]


def test_a_file_size_limit_is_reported(folder: Path) -> None:
    # A process that may not write a single byte to files gets an error that names the folder of leases.
    code = (
        "from launcher.node.leases import *; import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    )
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    code += "try: take(['cuda:0'], this_process('run-a', 0))\nexcept LeaseError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROGRAM.parents[2], capture_output=True, text=True)
    assert done.stdout.strip() == f"{folder}: File too large", done.stderr
    assert list(folder.iterdir()) == []


def test_a_locked_folder_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(lease, "_PATIENCE", 0.05)
    take([], this_process("run-a", 0))
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(LeaseError, match="another process has kept it locked"):
        held()
    os.close(descriptor)
    assert held() == []


@as_root
def test_other_users_share_the_folder_and_see_all_leases(folder: Path) -> None:
    take(["cuda:0"], this_process("run-a", 0))
    assert as_user(NOBODY, lambda: names(held())) == "[('cuda:0', 'run-a')]"
    assert "'run-a'" in as_user(NOBODY, lambda: take(["cuda:0", "cuda:1"], this_process("run-n", 0)))
    assert as_user(NOBODY, lambda: release("run-a", 0)) == "None"
    assert names(held()) == [("cuda:0", "run-a")], "another user's release has no effect"

    def theirs() -> object:
        assert take(["cuda:1"], this_process("run-n", 0)) == []
        return [(one.user, one.run_id) for one in held(["cuda:1"])]

    assert as_user(NOBODY, theirs) == "[('nobody', 'run-n')]"
    assert names(held()) == [("cuda:0", "run-a")], "the other user's process has ended"
    assert take(["cuda:1"], this_process("run-a", 0)) == [], "the file of the ended process blocks no one"


@as_root
def test_a_user_cannot_forge_leases_of_another(folder: Path) -> None:
    take([], this_process("run-a", 0))
    me = this_process("forged", 0)
    text = json.dumps(lease.Lease("cuda:0", *me)._asdict())
    assert as_user(NOBODY, lambda: (folder / "cuda-0.0.json").write_text(text)) == str(len(text))
    assert as_user(NOBODY, held) == "[]"
    (folder / "cuda-0.0.json").unlink()
    assert as_user(NOBODY, lambda: (folder / f"cuda-0.{NOBODY}.json").write_text(text)) == str(len(text))
    assert [one.user for one in held()] == ["nobody"]


@as_root
def test_a_lease_file_of_another_owner_is_reported(folder: Path) -> None:
    take([], this_process("run-a", 0))
    assert as_user(NOBODY, (folder / "cuda-0.1.json").touch) == "None"
    outcome = as_user(1, lambda: (held(), take(["cuda:0"], this_process("run-a", 0))))
    assert outcome == (
        f"LeaseError: {folder}/cuda-0.1.json belongs to nobody and was not created by gnnfleet; have it removed"
    )


@as_root
def test_a_folder_that_only_its_owner_can_write_to_is_reported(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    os.chown(folder, NOBODY, NOBODY)
    outcome = as_user(1, lambda: (held(), take(["cuda:0"], this_process("run-a", 0))))
    remedy = "have it removed or made writable for all users (chmod 1777)"
    assert outcome == f"LeaseError: {folder} belongs to nobody and has mode 755; {remedy}"
    folder.chmod(0o700)
    assert as_user(1, held) == f"LeaseError: {folder} belongs to nobody and has mode 700; {remedy}"
    assert as_user(NOBODY, lambda: take(["cuda:0"], this_process("run-a", 0))) == "[]"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777, "its owner's call corrects the mode"


@as_root
def test_a_process_hidden_in_proc_keeps_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    take(["cuda:0"], this_process("run-a", 0))
    monkeypatch.setattr(lease.procs, "look", lambda pid: None)
    assert as_user(NOBODY, lambda: names(held())) == "[('cuda:0', 'run-a')]"


def test_the_module_runs_without_installed_packages(tmp_path: Path) -> None:
    # Preflight sends leases.py and what it imports to Pythons without any packages; this runs it with the Python of the
    # tests, and with Python 3.8 where that is installed.
    take(["cuda:0"], this_process("run-a", 0))
    code = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.node import leases; print(leases.held())"
    for python in [sys.executable, "python3.8"]:
        try:
            argv = [python, "-I", "-S", "-B", "-c", code, str(PROGRAM.parents[2])]
            done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        except FileNotFoundError:
            continue
        if "not found" in done.stderr or "not installed" in done.stderr:  # a shim for a version that is not installed
            continue
        assert "resource='cuda:0', run_id='run-a'" in done.stdout, done.stderr


def test_leases_cost_little_time() -> None:
    # Preflight and every supervisor take and read leases, so taking and reading 20 leases must be cheap.
    before = resource.getrusage(resource.RUSAGE_SELF)
    me = this_process("run-a", 0)
    for _ in range(20):
        take([f"cuda:{number}" for number in range(20)], me)
        held()
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
