"""Tests of the zip loader, which joins several loaders and splits their batches over the ranks."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

from load_kit import hetero_data, homo_data, parts_of
from samplers_kit import TWO_HOSTS
from trainer import (
    DistGraphSAINTNodeSampler,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    DistShaDowKHopSampler,
    DistZipLoader,
)
from trainer.core.errors import SettingsError


def pair(data, **how):
    first, second = torch.arange(20), torch.arange(30, 55)
    return [DistNeighborLoader(data, [3], first, **how), DistNeighborLoader(data, [4], second, **how)]


@pytest.mark.parametrize("filter_per_worker", [None, True, False])
def test_batches_hold_the_same_positions_of_every_loader(filter_per_worker):
    loader = DistZipLoader(pair(homo_data(), transform=mark), filter_per_worker, batch_size=8, num_workers=2)
    assert str(loader) == "DistZipLoader(loaders=[DistNeighborLoader(), DistNeighborLoader()])"
    assert len(loader) == 3 and loader.dataset == range(20) and loader.batch_size == 8
    positions = [range(8), range(8, 16), range(16, 20)]
    for here, (one, other) in zip(positions, loader, strict=True):
        assert one.n_id[: one.batch_size].tolist() == [*here] == one.input_id.tolist() and one.marked
        assert other.n_id[: other.batch_size].tolist() == [30 + place for place in here] and other.marked
    one, other = loader([3, 19])
    assert (one.n_id[:2].tolist(), other.n_id[:2].tolist()) == ([3, 19], [33, 49])


def mark(data):
    data.marked = True
    return data


def test_loaders_draw_independently_and_epochs_differ():
    data = homo_data(num_edges=2000)
    loader = DistZipLoader([DistNeighborLoader(data, [3]), DistNeighborLoader(data, [3])], batch_size=60, shuffle=True)
    epochs = [list(loader), list(loader)]
    loader.set_epoch(0)
    again = list(loader)
    (((one, other),), ((later, _),)), ((same, _),) = epochs, again
    assert torch.equal(one.input_id, other.input_id) and not torch.equal(one.input_id, later.input_id)
    edges = [set(batch.e_id.tolist()) for batch in (one, other)]
    assert len(edges[0] & edges[1]) < len(edges[0])
    assert torch.equal(one.n_id, same.n_id) and torch.equal(one.e_id, same.e_id)


def test_ranks_split_the_positions_and_get_the_batches_of_one_process():
    graph, layout = parts_of(homo_data(), 4), TWO_HOSTS
    whole = list(DistZipLoader(pair(graph), batch_size=4 * layout.world_size, shuffle=True))
    ranks = [
        DistZipLoader(pair(graph, rank=rank, layout=layout), batch_size=4, shuffle=True)
        for rank in range(layout.world_size)
    ]
    for (one, other), *shares in zip(whole, *ranks, strict=True):
        for place, alone in enumerate((one, other)):
            found = [batches[place].input_id.tolist() for batches in shares]
            assert sorted(sum(found, [])) == sorted(alone.input_id.tolist()) and all(found)
        assert all(torch.equal(a.input_id, b.input_id) for a, b in shares)


def test_loaders_of_several_kinds_and_graphs():
    loaders = [
        DistLinkNeighborLoader(homo_data(), [2], neg_sampling="binary"),
        DistShaDowKHopSampler(homo_data(), 1, 3),
        DistNeighborLoader(hetero_data(), [2], "author"),
    ]
    links, roots, typed = next(iter(DistZipLoader(loaders, batch_size=5)))
    assert links.edge_label_index.shape == (2, 10) and len(roots.root_n_id) == 5
    assert typed["author"].input_id.tolist() == [0, 1, 2, 3, 4]


def test_invalid_combinations_are_refused():
    loader = DistNeighborLoader(homo_data(), [2])
    refused = {
        "loaders is empty": [],
        "loaders: list is not a loader of gnnfleet": [loader, [Data()]],
        "loaders: DistGraphSAINTNodeSampler draws its own nodes": [DistGraphSAINTNodeSampler(homo_data(), 3)],
        "all must use the same ranks": [loader, DistNeighborLoader(parts_of(homo_data(), 4), [2], layout=TWO_HOSTS)],
    }
    for message, loaders in refused.items():
        with pytest.raises(SettingsError, match=message):
            DistZipLoader(loaders)
    with pytest.raises(SettingsError, match="pass local=True to each of them"):
        DistZipLoader([loader], local=True)


def test_the_loaders_that_are_zipped_stay_as_they_are():
    loaders = pair(homo_data(), transform=mark)
    before = [vars(loader).copy() for loader in loaders]
    whole = [loader.output_options for loader in loaders]
    zipped = DistZipLoader(loaders, True, batch_size=8)
    assert len(list(zipped)) == 3 and zipped.cost.rows >= 0
    assert [vars(loader) for loader in loaders] == before and [loader.output_options for loader in loaders] == whole
    assert all(loader.output_options.on_threads for loader in zipped.loaders)
    assert [loader.cost for loader in loaders] == [type(zipped.cost)()] * 2
