"""Shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

#: Kernels are compiled once for all tests, hosts in namespaces and later runs of the tests included.
KERNELS = Path(os.environ.setdefault("GNNFLEET_KERNELS", str(REPOSITORY / ".gnnfleet" / "kernels")))


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
def local_workdirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where local nodes keep code and parts; shared by all tests, so that kernels are compiled once."""
    return tmp_path_factory.mktemp("workdirs")
