"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from launching import Launched, launch, local_config

REPOSITORY = Path(__file__).resolve().parents[1]

#: Files and folders whose tests are started first, so that parallel workers do not end with tests that take long.
#: The first file launches ``local_runs`` and compiles kernels; the next ones need neither.
LONGEST = (
    "tests/cluster/test_main_job", "tests/launcher/test_restart_run", "tests/cluster/test_bastion", "tests/cluster",
    "tests/launcher/test_serving_local", "tests/trainer/test_own_model", "tests/launcher/test_setup",
    "tests/trainer/test_list_tasks", "tests/launcher/test_failures_local", "tests/trainer/test_adversarial.py",
    "tests/launcher/test_peers_run", "tests/trainer/test_oracle.py", "tests/launcher/test_supervisor.py",
    "tests/trainer/test_cuda_step", "tests/launcher/test_transport_local", "tests/test_docs",
)  # fmt: skip

#: Compiled kernels are shared by all tests, by hosts in network namespaces, and by later test runs.
KERNELS = Path(os.environ.setdefault("GNNFLEET_KERNELS", str(REPOSITORY / ".gnnfleet" / "kernels")))

for name in ("COLUMNS", "LINES"):  # independent of the terminal; readline also sets them in parallel workers
    os.environ.pop(name, None)

# What tests write need not survive a power cut: thousands of flushes to the disk would take a third of the time of
# tests that write partition folders. Other processes than the workers flush as always.
os.fsync = lambda _: None  # type: ignore[assignment]

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    # Under `nohup make test &` these signals are ignored, and child processes would inherit that. A handler
    # that does nothing has the same effect on the tests, but is not inherited.
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

settings.register_profile("here", deadline=None)  # a busy machine is slow at times
settings.load_profile("here")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    # Temporary files are where pytest removes them some runs later. torch_geometric, for one, leaves one per layer.
    tempfile.tempdir = str(session.config._tmp_path_factory.mktemp("tmp"))  # type: ignore[attr-defined]
    os.environ["TMPDIR"] = tempfile.tempdir


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    # Each worker collects all tests: four keep two cores busy, and six did no more. Slow ones have deadlines to keep.
    cores = min(len(os.sched_getaffinity(0)), 6)
    return cores + (1 if config.option.markexpr == "slow" else 2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Parallel workers run no other test beside one that is marked ``quiet``. All take ``turnstile`` first, so that no
    # test overtakes a quiet one that waits. Record locks, because processes that a test forks do not inherit them.
    if getattr(item.config, "cache", None) is None:  # -p no:cacheprovider, as in a test that runs pytest
        return (yield)
    folder = item.config.cache.mkdir("quiet")
    with open(folder / "turnstile", "a+") as turnstile, open(folder / "tests", "a+") as tests:
        fcntl.lockf(turnstile, fcntl.LOCK_EX)
        fcntl.lockf(tests, fcntl.LOCK_EX if item.get_closest_marker("quiet") else fcntl.LOCK_SH)
        fcntl.lockf(turnstile, fcntl.LOCK_UN)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    # garbage collection would take half of the CPU time of collecting tests; later, frozen objects are skipped
    gc.disable()
    if worker := getattr(session.config, "workerinput", None):
        # All workers import all files. In a new checkout, each first rewrites the assertions of its share of them.
        files = sorted(Path(__file__).parent.rglob("test_*.py"))
        for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
            with suppress(pytest.Module.CollectError):  # reported when the file is collected
                _ = pytest.Module.from_parent(session, path=path).obj
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item: item.nodeid.partition("::")[0] for item in items}
    place = places_of(list(dict.fromkeys(files.values())))
    for item in items:
        if item.get_closest_marker("quiet"):  # last, because the other workers have to wait
            place[files[item]] = len(items)
    if turn := int(os.environ.get("GNNFLEET_TURN", 0)):  # of .ci/run: another third of the files comes first
        order = sorted(place, key=place.__getitem__)
        place = {file: (k + turn) % 3 * len(order) + k for k, file in enumerate(order)}
    items.sort(key=lambda item: place[files[item]])


def places_of(files: list[str]) -> dict[str, float]:
    """Return the order in which files of tests are started: ``LONGEST``, then the others.

    The others alternate between folders: tests of the launcher mostly wait, those of the trainer mostly compute.
    """
    place: dict[str, float] = {}
    folders: dict[str, list[str]] = {}
    for file in files:
        rank = next((k for k, beginning in enumerate(LONGEST) if file.startswith(beginning)), None)
        if rank is None:
            folders.setdefault(os.path.dirname(file), []).append(file)
        else:
            place[file] = rank
    for others in folders.values():
        place |= {file: len(LONGEST) + k / len(others) for k, file in enumerate(others)}
    return place


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else duckdb reports what is not collected at the end of the process


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session", autouse=True)
def registry_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data next to the checkout. Without it, the test is skipped."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not there")
    return folder


@pytest.fixture(scope="session")
def local_runs(tmp_path_factory: pytest.TempPathFactory, registry_of_runs: None) -> dict[str, Launched]:
    """Return two finished launches of the bundled trainer on this machine, shared by all pytest workers.

    Launch "one" has one node with one part, "two" has two nodes with one METIS part each. Both train on equal batches.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "local-runs"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ended.json").exists():
            two = {"partition": {"method": "metis"}}
            with ThreadPoolExecutor(2 if _kernels_stamp().exists() else 1) as pool:  # compile them only once
                one = pool.submit(_launch_local, folder / "one", [1])
                other = pool.submit(_launch_local, folder / "two", [1, 1], data=two)
                ended = [one.result(), other.result()]
            (folder / "ended.json").write_text(json.dumps([[done.status, done.output] for done in ended]))
    ended = json.loads((folder / "ended.json").read_text())
    return {name: Launched(*done, folder / name) for name, done in zip(("one", "two"), ended, strict=True)}


def _launch_local(folder: Path, procs: list[int], **sections: dict) -> Launched:
    folder.mkdir()
    config = local_config(folder, procs, run={"start_timeout": 500}, **sections)  # compiling kernels takes minutes
    return launch(config, env={**os.environ, "TMUX_TMPDIR": str(folder)}, timeout=500)


def _kernels_stamp() -> Path:
    """Return the path of a file that exists once the kernels of this version of the trainer have been compiled."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(REPOSITORY.glob("trainer/**/*.py"))))
    return KERNELS / f"run-{digest.hexdigest()[:16]}"


@pytest.fixture(scope="session")
def compiled_kernels(request: pytest.FixtureRequest) -> None:
    # before all tests, because many processes would else compile the same kernels at the same time
    stamp = _kernels_stamp()
    if not stamp.exists() and shutil.which("tmux"):
        for done in request.getfixturevalue("local_runs").values():
            assert done.status == 0, done.output
        KERNELS.mkdir(parents=True, exist_ok=True)
        stamp.touch()


@pytest.fixture(scope="session")
def local_workdirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workdirs")
