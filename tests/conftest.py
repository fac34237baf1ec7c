"""Shared by all tests."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from launching import Launched, launch, local_config

REPOSITORY = Path(__file__).resolve().parents[1]

#: Folders whose files are begun with, in parallel: none of those that take minutes may be left to the end.
LONGEST = ("tests/cluster", "tests/trainer", "tests/launcher")

#: Kernels are compiled once for all tests, hosts in namespaces and later runs of the tests included.
KERNELS = Path(os.environ.setdefault("GNNFLEET_KERNELS", str(REPOSITORY / ".gnnfleet" / "kernels")))

for name in ("COLUMNS", "LINES"):  # not the terminal's, nor those that readline leaves to parallel workers
    os.environ.pop(name, None)

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    # What `nohup make test &` has us ignore, processes that tests start would ignore, too. A handler that does nothing
    # leaves the tests themselves as they were: it is not inherited.
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

settings.register_profile("here", deadline=None)  # a machine that does several things at once is slow at times
settings.load_profile("here")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of ``-n auto``: tests wait for much of their time, so that one more than there are cores keeps these busy."""
    return min(len(os.sched_getaffinity(0)), 7) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank_of(item.nodeid))


def rank_of(nodeid: str) -> int:
    """Place of a test's folder in ``LONGEST``."""
    return next((k for k, folder in enumerate(LONGEST) if nodeid.startswith(folder)), len(LONGEST))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root folder."""
    return REPOSITORY


@pytest.fixture(scope="session", autouse=True)
def registry_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs launched by tests are registered in a folder of their own, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; the test is skipped where there is none."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not there")
    return folder


@pytest.fixture(scope="session")
def local_runs(tmp_path_factory: pytest.TempPathFactory, registry_of_runs: None) -> dict[str, Launched]:
    """Two launches of the bundled trainer on this machine, made once for all parallel workers.

    "one": one node with one part. "two": two nodes with a part each, by METIS. Both train on the same batches.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "local-runs"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ended.json").exists():
            two = {"partition": {"method": "metis"}}
            ended = [_launch_local(folder / "one", [1]), _launch_local(folder / "two", [1, 1], data=two)]
            (folder / "ended.json").write_text(json.dumps([[done.status, done.output] for done in ended]))
    ended = json.loads((folder / "ended.json").read_text())
    return {name: Launched(*done, folder / name) for name, done in zip(("one", "two"), ended, strict=True)}


def _launch_local(folder: Path, procs: list[int], **sections: dict) -> Launched:
    folder.mkdir()
    return launch(local_config(folder, procs, **sections), env={**os.environ, "TMUX_TMPDIR": str(folder)}, timeout=280)


@pytest.fixture(scope="session")
def compiled_kernels(request: pytest.FixtureRequest) -> None:
    """What most runs need is compiled by first ones; else all processes of several runs would do so at once."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(REPOSITORY.glob("trainer/**/*.py"))))
    stamp = KERNELS / f"run-{digest.hexdigest()[:16]}"
    if not stamp.exists() and shutil.which("tmux"):
        for done in request.getfixturevalue("local_runs").values():
            assert done.status == 0, done.output
        KERNELS.mkdir(parents=True, exist_ok=True)
        stamp.touch()


@pytest.fixture(scope="session")
def local_workdirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where local nodes keep code and parts; shared by all tests, so that kernels are compiled once."""
    return tmp_path_factory.mktemp("workdirs")
