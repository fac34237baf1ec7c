"""Tests on several sshd in network namespaces: `cluster` marker, skip reason, fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from failure_kit import parts, scene  # noqa: F401  fixtures
from netns import NetCluster, unavailable
from operator_kit import end_processes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"no namespaced hosts: {reason}"))


@pytest.fixture(scope="session", autouse=True)
def hosts_share_kernels(compiled_kernels: None) -> None:
    """They look for compiled kernels where the tests have them."""


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    """Three hosts that also take a password, for all tests of a worker; they share ``cluster.shared_folder``."""
    with NetCluster(3, password=True, shared_folder=tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture
def cluster(three_hosts: NetCluster) -> Iterator[NetCluster]:
    """The three hosts, without processes, links and programs as they were afterwards."""
    yield three_hosts
    for host in three_hosts.hosts:
        host.full_speed()
        host.unhide()
    end_processes(three_hosts)  # a test that failed must not fail the next one too


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., NetCluster]]:
    """``make_cluster(n, **options)``: hosts for one test only."""
    with ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(NetCluster(count, **options))
