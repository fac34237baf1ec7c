"""Tests on several sshd in network namespaces: `cluster` marker, skip reason, fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from failure_kit import cluster, parts, scene  # noqa: F401  fixtures
from netns import NetCluster, unavailable

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


@pytest.fixture(scope="module")
def cluster3() -> Iterator[NetCluster]:
    """Three hosts that share no folder; one set for all tests of a module."""
    with NetCluster(3) as made:
        yield made


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., NetCluster]]:
    """``make_cluster(n, **options)``: hosts for one test only."""
    with ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(NetCluster(count, **options))
