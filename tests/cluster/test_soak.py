"""Tests of the soak, the random test of runs with faults: its scenarios, and a short soak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netns import NetCluster
from scenario import HOSTS, KINDS, MAX_RANKS, NODE_KINDS, draw
from soak_kit import Soak, kinds_here
from soak_resources import MAY_GROW, growth

SEED = 4000


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    with NetCluster(HOSTS, machines=Soak.machines()) as cluster:
        yield Soak(cluster, tmp_path_factory.mktemp("soak"))


@pytest.mark.slow
def test_consecutive_seeds_have_every_kind_before_any_kind_repeats() -> None:
    first = SEED - SEED % len(KINDS)
    assert {draw(seed).fault.kind for seed in range(first, first + len(KINDS))} == set(KINDS)
    assert draw(SEED) == draw(SEED) != draw(SEED + len(KINDS))


def test_every_scenario_fits_on_the_hosts() -> None:
    scenarios = [draw(seed) for seed in range(2000)]
    for scenario in scenarios:
        assert 2 <= scenario.nodes <= HOSTS and sum(scenario.procs) <= MAX_RANKS
        assert scenario.fault.node < scenario.nodes and scenario.nodes + (scenario.resume == "more") <= HOSTS
        assert scenario.victim >= 0 or scenario.fault.node < scenario.servers
    assert {scenario.servers for scenario in scenarios} == {0, 1, 2}
    for kind in NODE_KINDS:
        ends = {(each.survives, each.starts_again) for each in scenarios if each.fault.kind == kind}
        assert ends == {(False, False), (True, False), (True, True)}
    assert not any(scenario.starts_again for scenario in scenarios if scenario.fault.kind in ("disk", "none", "ssh"))


def test_growth_is_found_after_the_warm_up_only() -> None:
    few, many = dict.fromkeys(MAY_GROW, 0.0), dict.fromkeys(MAY_GROW, 100.0)
    assert growth({0: few, 5: many}, warm_up=10) == []
    assert growth({0: few, 10: many, 20: many}, warm_up=10) == []
    assert growth({0: few, 10: few, 20: few | {"files on the hosts": 100.0}}, warm_up=10) == ["files on the hosts"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_scenario_of_each_kind_of_fault(soak: Soak, kind: str) -> None:
    if kind not in kinds_here():
        pytest.skip("no memory cgroup can be made here")
    first = SEED - SEED % len(KINDS)
    scenario = next(each for each in map(draw, range(first, first + len(KINDS))) if each.fault.kind == kind)
    verdict = soak.run(scenario)
    assert not verdict.wrong, str(verdict)
