"""Tests of recognising why the kernel keeps a process from running: swapping, a memory limit or blocked I/O."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.node.diagnostics.process_state import STOPPED, ProcessWatch, Sample, held_up, parse_stat, swapped

#: Recorded of a process that reads a mapped file of 96 MB at random, in a cgroup with 20 MB, one second apart.
THRASHING = (
    "19002 (python3) R 18981 18981 732 0 -1 4194304 3023 6537 12994 2 10 37 4 1 20 0 1 0 196379 117661696 6335 "
    "18446744073709551615 94050791120896 94050791121237 140727450708096 0 0 0 0 16781318 0 0 0 0 17 1 0 0 0 0 0",
    "19002 (python3) D 18981 18981 732 0 -1 4194304 3023 6537 17194 2 11 50 4 1 20 0 1 0 196379 117661696 6335 "
    "18446744073709551615 94050791120896 94050791121237 140727450708096 0 0 0 0 16781318 0 0 0 0 17 1 0 0 0 0 0",
)

SWAPPED = "Name:\tpython3\nState:\tD (disk sleep)\nVmRSS:\t  204800 kB\nVmSwap:\t 1200000 kB\nThreads:\t12\n"


def samples(states: str, faults: float = 0.0, cpu: float = 0.0) -> list[Sample]:
    """Return one sample for each letter of ``states``, a process state of /proc. Samples are 0.1 s apart.

    faults: major page faults per second. cpu: CPU seconds per second.
    """
    seen = [(0.1 * k, state) for k, state in enumerate(states)]
    return [Sample(t, {7: state}, round(100 + t * faults), 5 + t * cpu) for t, state in seen]


def test_a_process_that_reads_its_memory_from_disk() -> None:
    read = [parse_stat(text) for text in THRASHING]
    seen = [Sample(float(k), {19002: state}, faults, cpu) for k, (state, faults, cpu) in enumerate(read)]
    seen.insert(1, Sample(0.5, {19002: "D"}, 15000, seen[0].cpu_s + 0.07))
    assert held_up(19002, seen) == "state D: waits for memory (4,200 major page faults per second)"


def test_a_swapping_process_is_described_with_its_bytes_in_swap() -> None:
    words = held_up(7, samples("DDSDDDDDRD", faults=312), in_swap=swapped(SWAPPED))
    assert words == "state D: waits for memory (312 major page faults per second, 1.2 GB of it are in swap)"


def test_a_process_held_back_by_memory_high() -> None:
    # No fault has to read a disk: the kernel lets the process sleep, as it has used more than its cgroup may.
    words = held_up(7, samples("DDDDDRDDDD"), wchans={7: "__mem_cgroup_handle_over_high"})
    assert (
        words
        == "state D: waits for memory (held back by the memory limit of its cgroup, in __mem_cgroup_handle_over_high)"
    )


def test_a_process_blocked_by_a_network_file_system() -> None:
    words = held_up(7, samples("D" * 10), wchans={7: "rpc_wait_bit_killable"})
    assert words == (
        "state D: is blocked in rpc_wait_bit_killable (a disk, a network file system or a device does not answer)"
    )


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (samples("R" * 10, cpu=1.0), "computes"),
        (samples("S" * 10), "waits for another process"),
        (samples("SSDSRRSDSR", cpu=0.3), "reads files now and then"),
        (samples("RRDRRRRRRR", faults=400, cpu=0.9), "computes on memory-mapped files"),
        (samples("DD", faults=500), "was seen too briefly"),
        ([], "has ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_process_that_runs_or_waits_is_not_accused(seen: list[Sample], why: str) -> None:
    assert held_up(7, seen) == "", why


def test_a_stopped_process() -> None:
    assert held_up(7, samples("RRT")) == held_up(7, samples("t")) == STOPPED


def test_a_blocked_thread_of_a_process_whose_main_thread_waits() -> None:
    seen = [Sample(0.1 * k, {7: "S", 8: "D", 9: "SR"[k % 2]}, 0, 0.0) for k in range(10)]
    assert held_up(7, seen, wchans={8: "nfs_wait_bit_killable"}).startswith("state D: is blocked in nfs_wait_bit")


CGROUPS = Path("/sys/fs/cgroup/memory")

READS = """
import mmap, random, sys
file = open(sys.argv[1], "rb")
map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
map.madvise(mmap.MADV_RANDOM)
print("up", flush=True)
while True:
    map[random.randrange(len(map))]
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Yield a memory cgroup (version 1) with a limit of 20 MB."""
    folder = CGROUPS / f"gnnfleet-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(20 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.slow
def test_a_real_process_with_too_little_memory(small_cgroup: Path, tmp_path: Path) -> None:
    file = tmp_path / "data"
    with file.open("wb") as out:
        for _ in range(96):
            out.write(os.urandom(1 << 20))
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = f"echo $$ > {small_cgroup}/cgroup.procs; exec {sys.executable} -c '{READS}' {file}"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None and reader.stdout.readline() == "up\n"
            time.sleep(1)
            watch = ProcessWatch(reader.pid)
            for _ in range(12):
                watch.look(time.monotonic())
                time.sleep(0.1)
            first, last = watch.samples[0], watch.samples[-1]
            if last.cpu_s - first.cpu_s > 0.3 * (last.t - first.t):
                pytest.skip("the disk brings the pages so fast that the process hardly waits")
            assert watch.held_up().startswith("state D: waits for memory ("), watch.samples
        finally:
            reader.kill()
