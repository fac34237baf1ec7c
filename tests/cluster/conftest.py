"""Fixtures for tests on several SSH hosts in network namespaces. Tests are skipped where no such host can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from failure_kit import parts, scene  # noqa: F401  fixtures
from netns import NetCluster, unavailable
from operator_kit import end_processes

HERE = Path(__file__).parent

#: Files whose tests start no process of the trainer and need not wait until its kernels are compiled.
WITHOUT_TRAINER = ("test_bastion", "test_netns", "test_setup", "test_ssh_parity", "test_tasks", "test_wiring")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"no namespaced hosts: {reason}"))


@pytest.fixture(scope="module", autouse=True)
def kernels_of_hosts(request: pytest.FixtureRequest) -> None:
    if request.path.stem not in WITHOUT_TRAINER:
        request.getfixturevalue("compiled_kernels")


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    """Yield three hosts with a shared folder, which also accept a password. Tests of one pytest worker share them."""
    with NetCluster(3, password=True, shared_folder=tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture
def cluster(three_hosts: NetCluster) -> Iterator[NetCluster]:
    """Yield the cluster of three hosts. After the test, undo what it did to the hosts."""
    yield three_hosts
    for host in three_hosts.hosts:
        host.full_speed()
        host.unhide()
    end_processes(three_hosts)  # a failed test must not make the next one fail


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., NetCluster]]:
    """Return the function ``make_cluster(n, **options)``, which creates ``n`` hosts for one test."""
    with ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(NetCluster(count, **options))
