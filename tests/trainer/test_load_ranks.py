"""Tests of loaders in several processes, and of opening a graph from environment variables."""

from __future__ import annotations

import gc
import pickle
import re
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
import torch.distributed as dist

import trainer
from load_kit import hetero_data, homo_data, parts_of
from partitions import write_store
from train_kit import REPOSITORY, environment, run_forked, run_script, write_parts
from trainer import DistNeighborLoader
from trainer.core.errors import PartitionError, SettingsError
from trainer.core.ranks import RankGroup, Ranks
from trainer.graph.environment import open_any, this_process
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader import pyg_loader
from trainer.train.job import layout_of

#: The example of torch_geometric's documentation with another import and data argument, and a loader of rank 0 alone.
SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch_geometric.nn import GraphSAGE
    import trainer
    from trainer import DistNeighborLoader as NeighborLoader

    dist.init_process_group("gloo")
    data = trainer.open(sys.argv[1])
    train_idx = eval(sys.argv[2])
    torch.manual_seed(12345)
    model = DistributedDataParallel(GraphSAGE(4, 8, num_layers=2, out_channels=5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if dist.get_rank() == 0:  # a local loader that no other rank creates
        own = NeighborLoader(data, [2], input_nodes=torch.arange(17), batch_size=4, local=True)
        print("OWN", len(own), sum(batch.batch_size for batch in own), flush=True)
    train_loader = NeighborLoader(data, num_neighbors=[5, 5], input_nodes=train_idx, batch_size=4, shuffle=True)

    def train():
        model.train()
        total_loss = total_examples = 0
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            loss = F.cross_entropy(out, batch.y[:batch.batch_size])
            loss.backward()
            optimizer.step()
            total_loss += float(loss) * batch.batch_size
            total_examples += batch.batch_size
            seen.extend(batch.input_id.tolist())
        return total_loss / total_examples

    for epoch in range(2):
        seen = []
        loss = train()
    weights = sum(p.double().sum().item() for p in model.parameters())
    print(f"RESULT rank {dist.get_rank()} loss {loss:.4f} weights {weights:.9f} seeds {sorted(seen)}", flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path):
    write_store(tmp_path / "parts", parts_of(homo_data(), 2).store)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def by_torchrun(words, folder):
    env = environment() | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_the_environment(words, folder):
    ranks = run_script(words, 2, folder)
    assert [ended.returncode for ended in ranks] == [0, 0], ranks
    return "".join(ended.output for ended in ranks)


@pytest.mark.parametrize("start", [by_the_environment, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_a_script_for_torch_geometrics_loader_runs_distributed_with_the_loader_line_changed(folder, start):
    output = start(["script.py", "parts", "torch.arange(17)"], folder)
    found = re.findall(r"RESULT rank (\d) loss ([\d.]+) weights (\S+) seeds \[([\d, ]*)\]", output)
    assert sorted(rank for rank, *_ in found) == ["0", "1"]
    assert found[0][2] == found[1][2], "DDP keeps the ranks' weights equal"
    seeds = [int(seed) for *_, seen in found for seed in seen.split(",")]
    assert sorted(seeds) == list(range(17))
    assert "OWN 5 17" in output, "a local loader gives one rank all seeds and does not affect other ranks"


def test_seeds_split_by_rank_are_refused_with_the_reason(folder):
    ranks = run_script(["script.py", "parts", "torch.arange(16).split(8)[dist.get_rank()]"], 2, folder)
    output = "".join(ended.output for ended in ranks)  # one rank may lose the other before it prints the error
    assert all(ended.returncode != 0 for ended in ranks)
    assert re.search(r"SettingsError: the loader made at .*:\d+ has other seeds, .* on rank \d than on rank \d", output)
    assert "script.py:" in output and "Do not split seeds by rank" in output


@pytest.fixture
def checks(monkeypatch):
    """Return a function that makes loaders on two ranks in one process, all at one line, and returns who is refused.

    It takes steps in order: ("make" or "check", rank, seeds).
    """
    store, made = dist.HashStore(), ({}, {})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def run(steps):
        loaders, refused = {}, []
        for step, rank, seeds in steps:
            monkeypatch.setattr(pyg_loader, "_made", made[rank])
            try:
                if step == "make":
                    loaders[rank, seeds] = pyg_loader.SameOnAllRanks(seeds, rank, 2)
                else:
                    loaders[rank, seeds].check()
            except SettingsError:
                refused.append((rank, seeds))
        return refused

    return run


MANY = tuple(map(str, range(40)))


def both(rank, *seeds):
    return [(step, rank, each) for step in ("make", "check") for each in seeds]


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        (both(0, "a") + both(1, "a") + both(1, "b") + both(0, "b"), []),
        (both(0, "a") + both(1, "b"), [(1, "b")]),
        (both(0, "a", "b") + both(1, "b"), []),  # only rank 0 makes a
        (both(1, "b") + both(0, "a", "b"), []),
        (both(0, "a") + both(1, "a", "c") + both(0, "b") + both(1, "b"), []),  # only rank 1 makes c
        (both(0, "a") + both(1, "a") + both(0, "b") + both(1, "c"), [(1, "c")]),
        (both(0, *MANY) + both(1, "0"), []),  # rank 0 is 39 loaders ahead
        (both(0, "0") + both(1, *MANY), []),
        (both(0, *MANY[:30]) + both(1, *"abc"), [(1, each) for each in "abc"]),
    ],
)
def test_a_rank_may_make_more_loaders_at_a_line_than_others(steps, refused, checks):
    assert checks(steps) == refused


def test_loaders_of_a_line_are_told_apart_by_their_callers(checks):
    assert checks(both(0, "a")) == []
    assert checks(both(1, "b")) == []  # called from another line


def destroy_the_group_of_an_opened_graph(parts: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with trainer.open(parts):
        held = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert held() is not None


def test_a_destroyed_process_group_lives_on(folder):
    # otherwise the deletion of a DistributedDataParallel, its last owner, can hang (``keep_process_group``)
    (ended,) = run_forked(destroy_the_group_of_an_opened_graph, [str(folder / "parts")], 1)
    assert ended.returncode == 0, ended.output


def test_rank_and_layout_of_the_graph_are_the_default(tmp_path):
    write_store(tmp_path, parts_of(homo_data(), 2).store)
    environ = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    graph = open_any(tmp_path, environ=environ)
    assert graph.ranks.rank == 1 and graph.layout == RankLayout.everywhere(3, 2)
    loader = DistNeighborLoader(graph, [2], torch.arange(30), batch_size=10)
    assert (loader.rank, len(loader)) == (1, 1)
    assert len(next(iter(loader)).input_id) == 10


def test_open_takes_a_part_a_list_or_all(tmp_path):
    write_store(tmp_path, parts_of(hetero_data(), 3).store)
    with trainer.open(tmp_path) as graph:
        assert sorted(graph.store.parts) == [0, 1, 2] and graph.layout == RankLayout.single(3)
    with pytest.raises(PartitionError, match=r"parts \[0, 2\] of .* are neither opened here nor served"):
        trainer.open(tmp_path, 1)
    with pytest.raises(PartitionError, match=r"parts \[2\] of"):
        trainer.open(tmp_path, part=[0, 1])
    with pytest.raises(PartitionError, match="is missing"):
        trainer.open(tmp_path / "nowhere")


CLUSTER = (
    '{"run_id": "r", "num_parts": 2, "nodes": ['
    '{"node_rank": 0, "host": "a", "endpoint": null, "parts": [0, 1], "ranks": [0, 1]},'
    '{"node_rank": 1, "host": "b", "endpoint": null, "parts": [], "ranks": [2]}]}'
)


def environ_of(tmp_path, **more):
    write_store(tmp_path / "parts", parts_of(homo_data(), 2).store)
    (tmp_path / "cluster.json").write_text(CLUSTER)
    run = {"GNNFLEET_PARTS": str(tmp_path / "parts"), "GNNFLEET_PART_IDS": "0,1"}
    run |= {"GNNFLEET_CLUSTER": str(tmp_path / "cluster.json"), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    return run | more


def test_inside_a_run_open_needs_no_arguments(tmp_path):
    environ = environ_of(tmp_path, RANK="1", WORLD_SIZE="3", NODE_RANK="0")
    with open_any(environ=environ) as graph:
        assert sorted(graph.store.parts) == [0, 1] and graph.ranks.rank == 1
        assert graph.layout == RankLayout(3, ((0, 1), (0, 1)))


def test_a_process_without_a_rank_loads_everything_and_a_wrong_number_of_ranks_is_refused(tmp_path):
    environ = environ_of(tmp_path)
    with open_any(environ=environ) as graph:
        assert graph.layout == RankLayout.single(2)
    with pytest.raises(SettingsError, match="places 3 ranks, but 2 were started"):
        open_any(environ={**environ, "RANK": "1", "WORLD_SIZE": "2"})
    with pytest.raises(SettingsError, match="has no node 7"):
        open_any(environ=environ, node_rank=7)


def test_outside_a_run_open_needs_a_folder():
    with pytest.raises(SettingsError, match="GNNFLEET_PARTS, GNNFLEET_PART_IDS, GNNFLEET_CLUSTER not set"):
        open_any(environ={})
    assert this_process({}).world_size == 1


def test_an_unknown_attribute_of_trainer():
    with pytest.raises(AttributeError, match="has no attribute 'NeighborLoader'"):
        trainer.NeighborLoader  # noqa: B018


def test_blocks_move_with_the_batch():
    batch = DistNeighborLoader(hetero_data(), [2], "paper", batch_size=5)([1, 2]).to("meta")
    assert batch["paper"].x.is_meta and all(block.indices.is_meta for block in batch.blocks[0].values())


def test_blocks_are_made_when_they_are_first_read():
    batch = DistNeighborLoader(homo_data(), [3, 2], batch_size=5)([1, 2])
    assert "_blocks" not in vars(batch.blocks) and len(batch.blocks) == 2
    again, moved = pickle.loads(pickle.dumps(batch)).blocks, batch.to("cpu").blocks
    for ours, copied, other in zip(batch.blocks, again, moved, strict=True):
        assert ours.indices.equal(copied.indices) and ours.indptr.equal(other.indptr)


def test_a_rank_without_a_layout_is_refused():
    with pytest.raises(SettingsError, match="local=True"):
        DistNeighborLoader(homo_data(), [2], rank=0)
    with pytest.raises(SettingsError, match="leave rank and layout out"):
        DistNeighborLoader(homo_data(), [2], rank=0, local=True)


def test_batch_shares_of_all_ranks_are_in_the_layout(tmp_path, monkeypatch):
    class Gathered(RankGroup):
        def gather(self, value):
            return [value, ((1,), 0.25)]

    parts, group = write_parts(tmp_path / "parts", 2), Gathered(Ranks(world_size=2))
    with open_graph(parts) as graph:
        assert layout_of(graph, group).batch_shares == (1.0, 0.25)
        monkeypatch.setenv("GNNFLEET_BATCH_SHARE", "0.25")
        assert layout_of(graph, group).batch_shares == ()
