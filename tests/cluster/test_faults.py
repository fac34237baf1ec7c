"""Tests of random faults: the report names the first cause, no process is left on any node after ten seconds, and the
exit status is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fault_draw import KINDS, NODES, draw
from fault_kit import FaultyCluster
from netns import NetCluster
from netns_tools import no_memory_limits

SEED = 4


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    if reason := no_memory_limits():
        pytest.skip(reason)
    with NetCluster(NODES, machines=FaultyCluster.machines()) as cluster:
        yield FaultyCluster(cluster, tmp_path_factory.mktemp("faults"))


def test_a_draw_has_every_kind_before_any_kind_repeats() -> None:
    assert {fault.kind for fault in draw(len(KINDS), SEED)} == set(KINDS)
    assert draw(20, SEED) == draw(20, SEED) != draw(20, SEED + 1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_faults(faulty: FaultyCluster) -> None:
    verdicts = [faulty.run(fault) for fault in draw(50, SEED + 1)]
    wrong = [str(verdict) for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join(wrong)
