"""Tests of ``sync``, which sends files to nodes, and of ``mode: verify``, with simulated connection failures."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_cases import fast_cases
from launcher.errors import ConnectionLost, RemoteFileError, SyncError
from launcher.node.programs import files
from launcher.node.programs.files import CODE_LIST, PART_SUFFIX, sha256_of
from launcher.node.regular_file import make_way
from launcher.plan.model import LaunchPlan
from launcher.sync import transfer as transfer_module
from launcher.sync.progress import TransferProgress
from launcher.sync.push import sync
from launcher.sync.verify_parts import verify
from launcher.transport.base import OnBytes, Transport
from launcher.transport.local import LocalTransport
from run_kit import make_launch, make_node, make_parts, sync_plan
from trainer.core.errors import PartitionError
from trainer.store.part_files import distrusting
from waiting import stretched

X = "part0/nodes/node/attrs/x.npy"


class Breaking(LocalTransport):
    """A local transport that records all uploads. The first ``breaks`` uploads of x.npy fail after some bytes."""

    def __init__(self, node_rank: int, breaks: int = 0, error: Callable[[], Exception] | None = None):
        super().__init__(node_rank)
        self.breaks = breaks
        self.error = error or (lambda: ConnectionLost("connection lost", host="local", node_rank=node_rank))
        self.uploads: list[tuple[str, int]] = []
        self.connects = 0

    def connect(self, timeout: float) -> None:
        self.connects += 1

    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        self.uploads.append((dest, offset))
        if self.breaks and dest.endswith("x.npy.part"):
            self.breaks -= 1
            path = Path(dest)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if offset else "wb") as out:
                out.seek(offset)
                out.write(source.read_bytes()[offset : offset + 1000])
            raise self.error()
        super().upload(source, dest, offset=offset, on_bytes=on_bytes)


@pytest.fixture(autouse=True)
def quick_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "_BACK_OFF", (0.01, 0.01, 0.01))


def transports(plan: LaunchPlan, **kinds: Breaking) -> dict[int, Transport]:
    return {node.node_rank: kinds.get(f"node{node.node_rank}") or Breaking(node.node_rank) for node in plan.nodes}


def bytes_of(plan: LaunchPlan, node_rank: int) -> dict[str, bytes]:
    data = Path(plan.nodes[node_rank].data_dir)
    found = [path for path in data.rglob("*") if path.is_file() and path.name != ".gnnfleet-digests.json"]
    return {path.relative_to(data).as_posix(): path.read_bytes() for path in found}


def test_each_node_gets_its_part_the_shared_files_code_and_secrets(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    report = sync(plan, transports(plan))
    for node in plan.nodes:
        got = bytes_of(plan, node.node_rank)
        mine = f"part{node.node_rank}/nodes/node/attrs"
        assert set(got) == {f"{mine}/x.npy", f"{mine}/y.npy", "shared/nodes/node/seeds/train.npy", "manifest.json"}
        assert all(data == (tmp_path / "parts" / name).read_bytes() for name, data in got.items())
        assert Path(node.code_dir, "trainer/code.py").read_text() == "print('hello')\n"
        key = Path(node.run_dir, "service.key")
        assert (key.read_text(), key.stat().st_mode & 0o777) == ("hush", 0o600)
    assert report.bytes_sent > 0 and report.bytes_present == 0


def test_a_second_sync_sends_nothing(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    sync(plan, transports(plan))
    again = {0: Breaking(0), 1: Breaking(1)}
    report = sync(plan, again)
    assert again[0].uploads == again[1].uploads == []
    assert report.bytes_sent == 0
    code = len(plan.nodes) * sum(file.bytes for file in plan.code)
    assert report.bytes_present == code + sum(file.bytes for node in plan.nodes for file in node.files if file.source)


def test_only_a_changed_file_is_sent_again(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    sync(plan, transports(plan))
    damaged = Path(plan.nodes[0].data_dir, X)
    whole = damaged.read_bytes()
    damaged.write_bytes(b"?" + whole[1:])
    line = Breaking(0)
    sync(plan, transports(plan, node0=line))
    assert [Path(dest).name for dest, _ in line.uploads] == ["x.npy.part"]
    assert damaged.read_bytes() == whole


def test_damage_that_a_run_has_found_is_sent_again(tmp_path: Path) -> None:
    # Size and mtime of the files are as before, so that the digests of the last launch still hold.
    plan = sync_plan(tmp_path)
    sync(plan, transports(plan))
    data = Path(plan.nodes[0].data_dir)
    for name in (X, "manifest.json"):
        flip_byte(data / name)
    line = Breaking(0)
    sync(plan, transports(plan, node0=line))
    assert [Path(dest).name for dest, _ in line.uploads] == ["manifest.json.part"], "it names the damaged files"
    with pytest.raises(PartitionError), distrusting(data):
        raise PartitionError("found by a rank")
    sync(plan, transports(plan, node0=line))
    assert [Path(dest).name for dest, _ in line.uploads][1:] == ["x.npy.part"]
    assert bytes_of(plan, 0)[X] == (tmp_path / "parts" / X).read_bytes()


def flip_byte(path: Path) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def in_place_of(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "other").touch()


IN_PLACE = [folder_with_a_file, os.mkfifo, lambda path: path.symlink_to("/nowhere"), lambda path: path.symlink_to("/")]


@pytest.mark.parametrize("make", fast_cases(IN_PLACE, folder_with_a_file, os.mkfifo))
@pytest.mark.parametrize("name", fast_cases([X, "manifest.json", "shared/nodes/node/seeds/train.npy.part"], X))
def test_what_stands_in_the_place_of_a_file_is_replaced(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    plan = sync_plan(tmp_path)
    sync(plan, transports(plan))
    data = Path(plan.nodes[0].data_dir)
    (data / name.removesuffix(PART_SUFFIX)).unlink()
    make(data / name)
    sync(plan, transports(plan))
    sent = {path: (tmp_path / "parts" / path).read_bytes() for path in bytes_of(plan, 0)}
    assert bytes_of(plan, 0) == sent and len(sent) == 4


def test_what_is_behind_a_link_to_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/x.npy").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/part0").symlink_to(tmp_path / "elsewhere")
    make_way(str(tmp_path / "data/part0/x.npy"), str(tmp_path / "data"))
    assert (tmp_path / "elsewhere/x.npy").is_dir()


def test_a_file_in_the_place_of_a_folder_is_replaced(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    data = Path(plan.nodes[0].data_dir)
    for place in (data, data / "part0", data / "part0/nodes"):
        sync(plan, transports(plan))
        shutil.rmtree(place)
        place.touch()
        sync(plan, transports(plan))
        assert bytes_of(plan, 0)[X] == (tmp_path / "parts" / X).read_bytes()


def test_a_link_to_a_disk_that_is_not_mounted_stays(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    data = Path(plan.nodes[0].data_dir)
    data.parent.mkdir(parents=True)
    data.symlink_to(tmp_path / "not mounted")
    with pytest.raises(SyncError, match=rf"node0 \(local\): .*{data}"):
        sync(plan, transports(plan))
    assert data.is_symlink() and not (tmp_path / "not mounted").exists()


@pytest.mark.parametrize(
    "damage",
    fast_cases([flip_byte, Path.unlink, in_place_of(folder_with_a_file), in_place_of(os.mkfifo)], flip_byte),
)
def test_damaged_code_is_sent_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    plan = sync_plan(tmp_path)
    sync(plan, transports(plan))
    code = Path(plan.nodes[0].code_dir)
    for name in ("trainer/code.py", CODE_LIST):
        damage(code / name)
        (code / "trainer/__pycache__").mkdir()
        assert sync(plan, transports(plan)).bytes_sent
        assert (code / "trainer/code.py").read_text() == "print('hello')\n"
        assert not (code / "trainer/__pycache__").exists(), "it may have been compiled from the damaged file"
    assert sync(plan, transports(plan)).bytes_sent == 0


def test_after_a_broken_connection_the_upload_resumes(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    line = Breaking(0, breaks=2)
    sync(plan, transports(plan, node0=line))
    offsets = [offset for dest, offset in line.uploads if dest.endswith("x.npy.part")]
    assert offsets == [0, 1000, 2000]
    assert line.connects == 2
    assert bytes_of(plan, 0)[X] == (tmp_path / "parts" / X).read_bytes()
    assert not list(Path(plan.nodes[0].workdir).rglob("*.part"))


def test_a_connection_that_keeps_breaking_is_reported_and_leaves_a_part_to_resume(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    with pytest.raises(SyncError, match=r"node0 \(local\).*part0/nodes/node/attrs/x.npy.*run again to resume"):
        sync(plan, transports(plan, node0=Breaking(0, breaks=99)))
    data = Path(plan.nodes[0].data_dir)
    assert not (data / X).exists() and not (data / "manifest.json").exists()
    left = (data / "part0/nodes/node/attrs/x.npy.part").stat().st_size
    line = Breaking(0)
    sync(plan, transports(plan, node0=line))
    assert ((data / "part0/nodes/node/attrs/x.npy.part").as_posix(), left) in line.uploads
    assert (data / X).read_bytes() == (tmp_path / "parts" / X).read_bytes()


def test_a_part_file_of_another_version_is_replaced(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    stale = Path(plan.nodes[0].data_dir, "part0/nodes/node/attrs/x.npy.part")
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"another graph" * 100)
    sync(plan, transports(plan))
    assert bytes_of(plan, 0)[X] == (tmp_path / "parts" / X).read_bytes()


def test_a_changed_byte_in_a_local_part_is_refused_and_named(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    source = tmp_path / "parts/part1/nodes/node/attrs/y.npy"
    data = bytearray(source.read_bytes())
    data[1234] ^= 1
    source.write_bytes(data)
    with pytest.raises(
        SyncError, match=r"part1/nodes/node/attrs/y.npy on this machine differs from its manifest.*node1"
    ):
        sync(plan, transports(plan))
    assert not Path(plan.nodes[1].data_dir, "part1/nodes/node/attrs/y.npy").exists()
    assert not Path(plan.nodes[1].data_dir, "manifest.json").exists()


def test_a_full_disk_names_host_path_and_bytes(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    full = Breaking(1, 99, lambda: RemoteFileError("cannot write x: No space left on device", errno=errno.ENOSPC))
    with pytest.raises(
        SyncError, match=r"node1 \(local\): disk full at .*/part1/nodes/node/attrs: 50.0 kB still to be .* free"
    ):
        sync(plan, transports(plan, node1=full))


def test_one_node_that_fails_stops_the_others(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)

    class Slow(Breaking):
        def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
            for _ in range(400):
                time.sleep(0.05)
                assert on_bytes is not None
                on_bytes(1)

    started = time.monotonic()
    with pytest.raises(SyncError, match="node0"):
        broken = Breaking(0, 99, lambda: RemoteFileError("cannot write x: Permission denied", errno=errno.EACCES))
        sync(plan, {0: broken, 1: Slow(1)})
    assert time.monotonic() - started < stretched(15)  # without stopping, it would take 20 s


def test_progress_counts_exactly_the_bytes_sent(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path, num_nodes=1)
    totals: list[int] = []
    moved: list[int] = []

    class Counting(TransferProgress):
        def start(self, node_rank: int, total: int) -> None:
            totals.append(total)

        def advance(self, node_rank: int, count: int) -> None:
            moved.append(count)

    report = sync(plan, transports(plan), Counting())
    assert totals[1:] == [sum(len(data) for data in bytes_of(plan, 0).values())], "and first the packed code"
    assert sum(moved) == sum(totals) == report.bytes_sent


def test_ctrl_c_leaves_only_part_files_which_the_next_sync_resumes(tmp_path: Path) -> None:
    program = f"""
        import sys, time
        sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parent)]!r}
        from pathlib import Path
        from run_kit import sync_plan
        from launcher.sync.push import sync
        from launcher.transport.local import LocalTransport
        class Slow(LocalTransport):
            def upload(self, source, dest, *, offset=0, on_bytes=None):
                path = Path(dest)
                path.parent.mkdir(parents=True, exist_ok=True)
                data = source.read_bytes()
                with path.open("r+b" if offset else "wb", buffering=0) as out:
                    for at in range(offset, len(data), 1000):
                        out.seek(at)
                        on_bytes(out.write(data[at:at + 1000]))
                        if "x.npy" in dest:
                            time.sleep(0.05)
        plan = sync_plan(Path({str(tmp_path)!r}), num_nodes=1)
        try:
            sync(plan, {{0: Slow(0)}})
        except KeyboardInterrupt:
            sys.exit(130)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    part = tmp_path / "node0/data/part0/nodes/node/attrs/x.npy.part"
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 3000) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    cut = part.stat().st_size
    assert 3000 < cut < 50_000
    assert not (tmp_path / "node0/data/manifest.json").exists()
    line = Breaking(0)
    plan = sync_plan(tmp_path, num_nodes=1)
    sync(plan, {0: line})
    assert (str(part), cut) in line.uploads
    assert bytes_of(plan, 0)[X] == (tmp_path / "parts" / X).read_bytes()


@pytest.mark.parametrize("during", ["claim", "write"])
def test_ctrl_c_leaves_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str) -> None:
    plan, ask, written = sync_plan(tmp_path, num_nodes=1), transfer_module.ask_files, threading.Event()

    def interrupt(step: str) -> None:
        if step == during:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(1.0)  # sync ends meanwhile, unless it waits for this thread

    class Interrupted(Breaking):
        def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
            interrupt("write")
            super().write(data, dest, mode=mode)
            written.set()

    def asked(transport: Transport, node: Any, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        answer = ask(transport, node, request, timeout)
        interrupt(request["op"])
        return answer

    monkeypatch.setattr(transfer_module, "ask_files", asked)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            sync(plan, {0: Interrupted(0)})
    finally:
        signal.signal(signal.SIGINT, before)
    assert during == "claim" or written.wait(30)
    assert not Path(plan.nodes[0].run_dir).exists()


def test_of_two_launches_with_one_run_id_the_second_changes_nothing(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    folder = Path(plan.nodes[0].run_dir)
    (folder / "files").mkdir(parents=True)  # where programs on the node start, with an own script
    sync(plan, transports(plan))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    files = tuple(replace(file, content=file.content and "other") for file in plan.nodes[0].files)
    other = replace(plan, nodes=(replace(plan.nodes[0], files=files),))
    with pytest.raises(SyncError, match=rf"node0 \(local\): the run id is already in use: .*{folder}; choose another"):
        sync(other, transports(other))
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_failed_sync_leaves_no_run_folder_so_that_its_run_id_is_free(tmp_path: Path) -> None:
    plan = sync_plan(tmp_path)
    line = Breaking(0, breaks=9, error=lambda: RemoteFileError("no space", errno=errno.ENOSPC))
    with pytest.raises(SyncError):
        sync(plan, transports(plan, node0=line))
    assert not any(Path(node.run_dir).exists() for node in plan.nodes)
    sync(plan, transports(plan))
    assert Path(plan.nodes[0].run_dir, "service.key").exists()


def shared_plan(folder: Path, top: Path, *, other: Path | None = None) -> LaunchPlan:
    return make_launch([make_node(top, 0, [], folder), make_node(top, 1, [], other or folder)])


def test_verify_caches_digests_by_size_and_mtime(tmp_path: Path) -> None:
    folder = make_parts(tmp_path / "shared")
    plan = shared_plan(folder, tmp_path)
    report = verify(plan, transports(plan))
    assert (report.fingerprint, report.files) == ("f00d", 8)
    whole = (folder / X).stat()
    (folder / X).write_bytes(b"?" * whole.st_size)
    os.utime(folder / X, ns=(whole.st_atime_ns, whole.st_mtime_ns))
    assert verify(plan, transports(plan)).files == 8, "same size and mtime: the stored digest is used"


def test_digests_that_another_thread_finds_meanwhile_are_kept(tmp_path: Path, monkeypatch) -> None:
    for name in ("a", "b", files.CACHE_NAME):
        (tmp_path / name).write_text("{}")
    cache, read = files.DigestCache(), json.load

    def load_while_another_thread_looks_at_a(stream):
        monkeypatch.setattr(json, "load", read)
        return read(stream), cache.digest(f"{tmp_path}/a")

    monkeypatch.setattr(json, "load", lambda stream: load_while_another_thread_looks_at_a(stream)[0])
    cache.digest(f"{tmp_path}/b")
    assert set(cache.folders[str(tmp_path)]) == {"a", "b"}


def test_verify_refuses_a_changed_byte_and_names_node_host_and_file(tmp_path: Path) -> None:
    folder = make_parts(tmp_path / "shared")
    plan = shared_plan(folder, tmp_path)
    verify(plan, transports(plan))
    path = folder / "part1/nodes/node/attrs/x.npy"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    with pytest.raises(
        SyncError, match=r"node1 \(local\): .*part1/nodes/node/attrs/x.npy differs from the manifest"
    ) as caught:
        verify(plan, transports(plan))
    assert "node0" not in str(caught.value), "node 0 does not use part 1"


def test_verify_names_a_missing_part_and_a_node_without_the_folder(tmp_path: Path) -> None:
    folder = make_parts(tmp_path / "shared")
    (folder / "part1/nodes/node/attrs/y.npy").unlink()
    plan = shared_plan(folder, tmp_path)
    with pytest.raises(SyncError, match=r"node1 \(local\): .*part1/nodes/node/attrs/y.npy is missing"):
        verify(plan, transports(plan))
    plan = shared_plan(folder, tmp_path, other=tmp_path / "not-mounted")
    with pytest.raises(SyncError, match=r"node1 \(local\): no .*/not-mounted/manifest.json\n.*data_folder"):
        verify(plan, transports(plan))


def test_verify_without_parts_names_the_command_that_makes_them(tmp_path: Path) -> None:
    plan = shared_plan(tmp_path / "nowhere", tmp_path)
    with pytest.raises(SyncError, match="gnnfleet partition make --config"):
        verify(plan, transports(plan))


def test_verify_refuses_two_different_partitions(tmp_path: Path) -> None:
    plan = shared_plan(make_parts(tmp_path / "a"), tmp_path, other=make_parts(tmp_path / "b", size=90_000))
    with pytest.raises(SyncError, match="parts of the same partition"):
        verify(plan, transports(plan))


@pytest.mark.parametrize("path", ["/usr/bin:/bin", "/nowhere"], ids=["with tar", "without tar"])
def test_code_is_unpacked_with_or_without_the_program_tar(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, archive, dest = tmp_path / "x.py", tmp_path / "a.tgz", tmp_path / "code"
    source.write_text("x = 1\n")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, "launcher/x.py")
    monkeypatch.setenv("PATH", path)
    assert files.unpack(str(archive), sha256_of(str(archive)), str(dest)) == ""
    assert (dest / "launcher/x.py").read_text() == "x = 1\n" and dest.stat().st_mode & 0o777 == 0o755
    archive.write_bytes(b"not an archive")
    with pytest.raises(tarfile.ReadError):
        files.unpack(str(archive), sha256_of(str(archive)), str(tmp_path / "other"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.tgz", "code", "x.py"]


def test_two_simultaneous_launches_can_send_the_same_file_and_code(tmp_path: Path) -> None:
    # When two launches send the same file or code, the second launch finds it in place, which is no error.
    part = tmp_path / f"x.npy{PART_SUFFIX}"
    part.write_bytes(b"rows")
    entry = {"path": str(tmp_path / "x.npy"), "bytes": 4, "sha256": sha256_of(str(part))}
    for _ in range(2):
        assert files.main({"op": "commit", "files": [entry]}) == {"files": [{"path": entry["path"], "error": ""}]}
    dest = tmp_path / "code" / "abc"
    for number in range(2):
        archive = tmp_path / f"{number}.tgz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(entry["path"], "x.npy")
        request = {"op": "unpack", "archive": str(archive), "sha256": sha256_of(str(archive)), "dest": str(dest)}
        dest.parent.mkdir(exist_ok=True)
        assert files.main(request) == {"error": ""} and not archive.exists()
    assert [path.name for path in dest.parent.iterdir()] == ["abc"] and (dest / "x.npy").read_bytes() == b"rows"
    assert files.main({"op": "commit", "files": [{**entry, "sha256": "0" * 64}]})["files"][0]["error"]
