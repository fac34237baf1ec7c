"""Tests of negative links: number, ends, weights and times; equal for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from trainer.core.errors import DataError, SettingsError
from trainer.core.rng import hashed
from trainer.loader.negatives import NegativeDraw, NegativeRule, draw_negatives

KEY = 12345


def drawn(rule, places, global_size, ends, is_link=None, times=None, key=KEY):
    """Draw negatives. Return (source, target) by (place of the positive link, number of the negative).

    places: indices of the positive links in the global batch. is_link: function that tells which pairs are links.
    times: times of the links of the global batch.
    """
    places = np.asarray(places)
    owner, j = rule.owners(places, global_size)
    src, dst = draw_negatives(
        rule, key, places, owner, j, (places * 10, places * 10 + 1), ends, is_link or no_links,
        None if times is None else np.asarray(times)[places],
    )  # fmt: skip
    return {(int(places[o]), int(n)): (int(s), int(d)) for o, n, s, d in zip(owner, j, src, dst, strict=True)}


def no_links(src, dst):
    return np.zeros(len(src), bool)


@pytest.mark.parametrize(("amount", "expected"), [(1, 7), (2, 14), (0.5, 4), (1.5, 11), (0.01, 1)])
def test_the_number_of_negatives_is_rounded_up_per_global_batch(amount, expected):
    rule = NegativeRule(triplet=False, amount=amount)
    owner, _ = rule.owners(np.arange(7), 7)
    assert len(owner) == expected


@pytest.mark.parametrize("triplet", [False, True])
@pytest.mark.parametrize("amount", [1, 3])
def test_ranks_draw_what_one_process_draws(triplet, amount):
    rule = NegativeRule(triplet, amount)
    ends = NegativeDraw(50), NegativeDraw(70)
    whole = drawn(rule, range(9), 9, ends)
    shares = [drawn(rule, share, 9, ends) for share in ([0, 3, 8], [1, 2, 4, 5, 6, 7], [])]
    assert whole == {**shares[0], **shares[1], **shares[2]}
    assert len(whole) == 9 * amount


def test_a_fractional_amount_is_split_completely_over_ranks():
    rule = NegativeRule(triplet=False, amount=0.5)
    ends = NegativeDraw(50), NegativeDraw(50)
    whole = drawn(rule, range(9), 9, ends)
    assert whole == {**drawn(rule, [1, 3, 5, 7], 9, ends), **drawn(rule, [0, 2, 4, 6, 8], 9, ends)}
    assert len(whole) == 5


def test_both_ends_are_drawn_uniformly_and_independently():
    pairs = np.array(
        list(drawn(NegativeRule(False, 1), range(8000), 8000, (NegativeDraw(4), NegativeDraw(5))).values())
    )
    counts = np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=20)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


def test_a_triplet_keeps_its_source():
    found = drawn(NegativeRule(True, 2), range(20), 20, (NegativeDraw(5), NegativeDraw(5)))
    assert all(src == place * 10 for (place, _), (src, _) in found.items())


def test_nodes_are_drawn_by_weight_and_never_with_weight_zero():
    weight = np.array([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    ends = NegativeDraw(6, weight), NegativeDraw(6)
    src = np.array([src for src, _ in drawn(NegativeRule(False, 1), range(8000), 8000, ends).values()])
    counts = np.bincount(src, minlength=6)
    assert counts[[0, 3, 5]].sum() == 0
    assert scipy.stats.chisquare(counts[[1, 2, 4]], 8000 * np.array([1, 3, 4]) / 8).pvalue > 1e-4


def test_nodes_later_than_the_link_are_never_drawn():
    node_time = np.array([5, 1, 9, 3, 3, 7])
    times = np.arange(1, 10).repeat(300)
    ends = NegativeDraw(6, times=node_time), NegativeDraw(6, times=node_time)
    found = drawn(NegativeRule(False, 1), range(len(times)), len(times), ends, times=times)
    late = [(p, pair) for (p, _), pair in found.items() if max(node_time[list(pair)]) > times[p]]
    assert late == []
    at_three = [pair[1] for (p, _), pair in found.items() if times[p] == 3]
    assert set(at_three) == {1, 3, 4}


def test_a_link_older_than_every_node_is_refused():
    with pytest.raises(DataError, match="no negative for a link of time 0"):
        NegativeDraw(2, times=np.array([1, 2])).draw(np.zeros(1, np.uint64), np.zeros(1, np.int64))


def test_links_are_avoided_when_asked():
    def is_link(src, dst):
        return (src + dst) % 3 != 0

    ends = NegativeDraw(9), NegativeDraw(9)
    avoided = drawn(NegativeRule(False, 2, avoid_links=True), range(100), 100, ends, is_link)
    assert all((src + dst) % 3 == 0 for src, dst in avoided.values())
    free = drawn(NegativeRule(False, 2), range(100), 100, ends, is_link)
    assert any((src + dst) % 3 for src, dst in free.values())
    assert all(pair == avoided[at] for at, pair in free.items() if sum(pair) % 3 == 0), (
        "only draws that hit a link are repeated"
    )


def test_a_graph_without_non_links_is_an_error():
    with pytest.raises(DataError, match="no negative for the link from 0 to 1"):
        drawn(NegativeRule(True, 1, avoid_links=True), [0], 1, (NegativeDraw(3), NegativeDraw(3)), lambda s, d: s >= 0)


@pytest.mark.parametrize(
    ("weight", "message"),
    [([1.0], "shape"), ([1, -1, 1], "not negative"), ([0, 0, 0], "not all 0"), ([1, np.nan, 1], "finite")],
)
def test_invalid_weights_are_refused(weight, message):
    with pytest.raises(SettingsError, match=message):
        NegativeDraw(3, np.array(weight))


def test_weights_apply_among_the_nodes_up_to_a_time():
    draw = NegativeDraw(4, np.array([3, 0, 1, 5]), np.array([7, 1, 5, 9]))
    keys = hashed(np.arange(4000, dtype=np.uint64))
    share = np.bincount(draw.draw(keys, np.full(4000, 8)), minlength=4) / 4000
    assert share[1] == share[3] == 0 and 0.72 < share[0] < 0.78
    assert set(draw.draw(keys[:100], np.full(100, 6))) == {2}
    with pytest.raises(DataError, match="nodes up to it have weight 0"):
        draw.draw(keys[:1], np.array([3]))


def test_another_key_draws_other_negatives():
    ends = NegativeDraw(1000), NegativeDraw(1000)
    rule = NegativeRule(False, 1)
    assert drawn(rule, range(20), 20, ends) != drawn(rule, range(20), 20, ends, key=KEY + 1)
