"""Tests of requests to a graph server over a network connection that is slow, cut for a while, or dead."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from netns import REPOSITORY, Host, NetCluster
from trainer.core.errors import ServerGone
from trainer.core.schema import HOMO_NODE
from trainer.sampler.types import RowRequest
from trainer.service.client import HostClient
from trainer.service.messages import ServerAddress, Stats
from waiting import DEADLINE, stretched

_PORT = 5000
pytestmark = [pytest.mark.slow, pytest.mark.quiet]


@pytest.fixture
def host() -> Iterator[Host]:
    with NetCluster(1) as cluster:
        (host,) = cluster.hosts
        path = f"{REPOSITORY}:{REPOSITORY}/tests:{REPOSITORY}/tests/trainer"
        code = f"from service_kit import _serve; _serve('tcp://0.0.0.0:{_PORT}')"
        serve = f'PYTHONPATH={path} setsid {sys.executable} -c "{code}" >/tmp/serve.log 2>&1 &'
        host.run(["bash", "-c", serve])
        yield host


def client_of(host: Host, deadline: float, gone_after: float | None = None) -> HostClient:
    endpoint = f"tcp://{host.address}:{_PORT}"
    client = HostClient(ServerAddress("node1 (h1)", 1, "h1", endpoint, (0,)), deadline, gone_after=gone_after)
    until = time.monotonic() + DEADLINE  # the server may have to compile its kernels first
    while True:
        try:
            client.greet().result()
            return client
        except ServerGone:
            assert time.monotonic() < until


def gather_wide(client: HostClient, rows: int) -> float:
    """Request ``rows`` feature rows of 4 KiB each; return the seconds taken."""
    start, nodes = time.monotonic(), np.arange(rows)
    (answer,) = client.gather([RowRequest(HOMO_NODE, nodes, ("wide",))])
    np.testing.assert_array_equal(answer["wide"][:, 1023], nodes)
    return time.monotonic() - start


def test_large_answers_over_ten_megabits_arrive_at_the_first_attempt(host: Host) -> None:
    # One answer of 30 MB, and then 24 answers at once, take longer than the deadline. They arrive all the same, because
    # the deadline limits the time without any data, not the whole time.
    client = client_of(host, deadline=8)
    host.slow_link("10mbit")
    assert gather_wide(client, 7500) > 20
    with ThreadPoolExecutor(24) as pool:
        took = list(pool.map(lambda _: gather_wide(client, 400), range(24)))
    assert max(took) > 20
    host.full_speed()
    # one hello, two requests for the large answer (a row is assumed to take 1 KiB), 24 further requests; no repetitions
    assert client.ask(Stats()).requests == 1 + 2 + 24
    client.close()


def test_a_cut_of_five_seconds_loses_nothing(host: Host) -> None:
    client = client_of(host, deadline=30, gone_after=3)
    with ThreadPoolExecutor(4) as pool:
        under_way = [pool.submit(lambda: [gather_wide(client, 300) for _ in range(30)]) for _ in range(4)]
        host.slow_link("200mbit")
        time.sleep(1)
        host.cut_network()
        time.sleep(5)
        host.restore_network()
        took = [max(future.result(60)) for future in under_way]
    assert 4 < max(took) < stretched(14)
    assert client.ask(Stats()).errors == 0
    client.close()


def test_a_vanished_host_is_reported_lost_within_seconds(host: Host) -> None:
    client = client_of(host, deadline=60, gone_after=3)
    gather_wide(client, 3)
    host.cut_network()
    start = time.monotonic()
    with pytest.raises(ServerGone, match="connection lost"):
        gather_wide(client, 3)
    assert time.monotonic() - start < stretched(20)
    host.restore_network()
    client.close()
