"""Tests of model classes of users: the same curve on any number of processes, resumed or not; inference; refusals."""

from __future__ import annotations

import dataclasses
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gnnfleet as gf
from fast_cases import fast_cases
from graphs import graph
from nn_kit import homogeneous
from own_models_kit import write_models
from train_kit import SMALL, chosen_cases, curve, job, run_ranks, write_parts
from trainer.core.batch import Batch
from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.ranks import Ranks
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.graph.seed_order import RankLayout
from trainer.infer.infer import infer
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.own.blockwise import edge_index_of
from trainer.own.model_class import check_class, load_class, relative_name, save_sources
from trainer.own.own_model import build_own, small_batch
from trainer.own.unrolled import unrolled
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.train.job import train
from trainer.train.model import check_on_graph
from trainer.train.settings import InferJob, TrainJob, TrainSettings

MORE = """
import torch
from torch_geometric.nn import HGTConv, Linear


class Typed(nn.Module):
    def __init__(self, hidden_channels, out_channels, metadata, heads, num_layers):
        super().__init__()
        self.lins = nn.ModuleDict({of: Linear(-1, hidden_channels) for of in metadata[0]})
        self.convs = nn.ModuleList(
            HGTConv(hidden_channels, hidden_channels, metadata, heads) for _ in range(num_layers)
        )
        self.head, self.drop = nn.Linear(hidden_channels, out_channels), nn.Dropout(0.3)

    def forward(self, x_dict, edge_index_dict):
        rows = {of: self.drop(act(self.lins[of](x))) for of, x in x_dict.items()}
        for conv in self.convs:
            rows = conv(rows, edge_index_dict)
        return {of: self.head(h) for of, h in rows.items()}


class Noisy(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, batch):
        x = batch.x + 0.1 * torch.rand_like(batch.x) if self.training else batch.x
        assert sum(batch.num_sampled_nodes) == len(x) and sum(batch.num_sampled_edges) == batch.edge_index.shape[1]
        return self.lin(x)[: batch.batch_size]


class Weighted(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index, edge_weight):
        src, dst = edge_index
        return self.lin(x.index_add(0, dst, x[src] * edge_weight[:, None]))


class Lacks(nn.Module):
    def __init__(self, in_channels, num_feats):
        super().__init__()


class Strange(nn.Module):
    def __init__(self, in_channels):
        super().__init__()

    def forward(self, features, edges):
        return features


class Wide(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels + 1)

    def forward(self, x, edge_index):
        return self.lin(x)


SIZE = 3


class Broken(nn.Module):
    def __init__(self, in_channels):
        super().__init__()

    def forward(self, x, edge_index):
        return x @ x
"""

HOMO = ("Own", "torch_geometric.nn.GraphSAGE", "torch_geometric.nn.GAT", "torch_geometric.nn.GIN",
        "torch_geometric.nn.PNA")  # fmt: skip
HETERO = ("Own", "Typed", "torch_geometric.nn.GraphSAGE", "torch_geometric.nn.PNA")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("sources")
    write_models(folder, MORE)
    yield folder
    for name in ("helpers_of_mine", "own_models"):
        sys.modules.pop(name, None)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def homo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("homo") / "parts", 2, homophily=0.8)


@pytest.fixture(scope="module")
def hetero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("hetero") / "parts", 2, "synthetic-hetero")


def named(sources: Path, model: str) -> str:
    return model if "." in model else f"{sources}/own_models.py:{model}"


#: Hops with other fanouts: which neighbours a node has must not depend on the other seeds of a rank.
FANOUTS = {"homo": (5, 3), "hetero": (2, 4)}


def jobs(sources: Path, homo: Path, hetero: Path, folder: Path, cases: set[str]) -> list[TrainJob]:
    return [one for one in all_jobs(sources, homo, hetero, folder) if str(one.run_dir.relative_to(folder)) in cases]


def all_jobs(sources: Path, homo: Path, hetero: Path, folder: Path):
    """Yield the jobs of ``CASES``."""
    common = {"epochs": 1, "dropout": 0.5, "heads": 2}
    for parts, kind, models in ((homo, "homo", HOMO), (hetero, "hetero", HETERO)):
        for model in models:
            more = {**common, "epochs": 2} if f"{kind}/{model}" in RESUMED else common
            yield job(parts, folder / kind / model, model=named(sources, model), fanouts=FANOUTS[kind], **more)
    links = {**common, "task": "link", "target": "paper__cites__paper", "batch_size": 500, "negatives": 20}
    yield job(hetero, folder / "links", model=named(sources, "Typed"), **links)
    # Layers that read degrees, and more layers than hops: what other seeds expand must not matter.
    yield job(homo, folder / "degrees", model="torch_geometric.nn.GCN")
    for parts, name in ((homo, "deep"), (hetero, "typed deep")):
        yield job(parts, folder / name, model=named(sources, "Own"), model_args={"depth": 2})
    yield job(homo, folder / "noisy", model=named(sources, "Noisy"), **common)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> set[str]:
    layerwise = {"homo/torch_geometric.nn.GraphSAGE", "homo/torch_geometric.nn.GAT"}
    return chosen_cases(request, "case") | layerwise | {"homo/Own", "noisy"}


@pytest.fixture(scope="module")
def alone(sources: Path, homo: Path, hetero: Path, cases: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for each in jobs(sources, homo, hetero, folder, cases):
        train(each, Ranks())
    return folder


FAST = ("homo/Own", "hetero/Typed", "hetero/torch_geometric.nn.GraphSAGE", "links", "deep")
CASES = [
    *(f"homo/{model}" for model in HOMO),
    *(f"hetero/{model}" for model in HETERO),
    "links",
    "degrees",
    "typed deep",
    "deep",
]
RESUMED = ("homo/Own", "hetero/Typed", "hetero/torch_geometric.nn.GraphSAGE")


@pytest.fixture(scope="module")
def together(
    sources: Path, homo: Path, hetero: Path, cases: set[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("together")
    for ended in run_ranks(2, *jobs(sources, homo, hetero, folder, cases)):
        assert ended.returncode == 0, ended.output
    return folder


@pytest.mark.parametrize("fanouts", [(6, 3), (3, 6), (4, 3, 5)])
def test_an_unrolled_batch_has_the_neighbours_of_each_hop(homo: Path, fanouts: tuple[int, ...]) -> None:
    with gf.open(homo) as opened:
        loader = BatchLoader(opened, LoaderSettings("train", fanouts, 32), 0, RankLayout.single(2))
        batch = next(iter(loader.epoch(1))).typed()
    kept = {HOMO_NODE: torch.arange(len(batch.n_id[HOMO_NODE]))}
    made, rows = unrolled(batch, kept, [HOMO_EDGE])
    ids, counts, block = rows[HOMO_NODE].tolist(), made.num_nodes[HOMO_NODE], made.blocks[0][HOMO_EDGE]
    assert counts[0] == 32 == batch.num_seeds and ids[:32] == [*range(32)] and block.num_dst == counts[-2]
    for hop, (first, last) in enumerate(pairwise((0, *counts[:-1]))):
        of_hop = batch.blocks[-1 - hop][HOMO_EDGE]
        for place in range(first, last):
            sources = block.indices[block.indptr[place] : block.indptr[place + 1]].tolist()
            row = slice(of_hop.indptr[ids[place]], of_hop.indptr[ids[place] + 1])
            assert [ids[source] for source in sources] == of_hop.indices[row].tolist()
            assert all(last <= source < counts[hop + 1] for source in sources)
    assert sorted(set(ids[counts[-2] :])) == ids[counts[-2] :], "once per depth"


@pytest.mark.parametrize("case", fast_cases(CASES, *FAST))
def test_several_processes_train_the_same_model_as_one(case: str, alone: Path, together: Path) -> None:
    ours = curve(together / case)
    assert len(ours) >= (6 if case in RESUMED else 3)
    np.testing.assert_allclose(ours, curve(alone / case), rtol=2e-5)


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_continues_the_curve_exactly(
    case: str, sources: Path, homo: Path, hetero: Path, alone: Path, tmp_path: Path
) -> None:
    first = str(alone / case / "checkpoints" / "epoch-0001.pt")
    kind, _, model = case.partition("/")
    more = {"epochs": 2, "dropout": 0.5, "heads": 2, "resume": first, "fanouts": FANOUTS[kind]}
    train(job(homo if kind == "homo" else hetero, tmp_path, model=named(sources, model), **more), Ranks())
    whole = curve(alone / case)
    assert curve(tmp_path) == whole[len(whole) // 2 :]


def test_random_numbers_of_a_model_itself_depend_on_the_step_alone(
    sources: Path, homo: Path, alone: Path, tmp_path: Path
) -> None:
    torch.manual_seed(99)
    train(job(homo, tmp_path, model=named(sources, "Noisy"), epochs=1, dropout=0.5, heads=2), Ranks())
    assert curve(tmp_path) == curve(alone / "noisy")


def test_the_sources_are_kept_with_the_run_and_the_model_loads_in_one_line(
    alone: Path, homo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = alone / "homo/Own"
    assert {path.name for path in (run / "files").iterdir()} == {"helpers_of_mine.py", "own_models.py"}
    monkeypatch.chdir(tmp_path)
    model = gf.load_model(run)
    assert type(model).__name__ == "Own" and not model.training
    built = model.built_from
    assert built["settings"]["dropout"] == 0.5 and built["epoch"] in (1, 2) and 0 < built["metrics"]["accuracy"] <= 1
    with gf.open(homo) as opened:
        assert model(torch.zeros(3, opened.num_features), torch.tensor([[0, 1], [1, 2]])).shape == (3, 4)


@pytest.mark.parametrize("model", ["torch_geometric.nn.GraphSAGE", "torch_geometric.nn.GAT"])
def test_inference_layer_by_layer_equals_the_loaded_model_on_the_whole_graph(
    model: str, homo: Path, alone: Path, tmp_path: Path
) -> None:
    run = alone / "homo" / model
    result = infer(InferJob(run / "checkpoints" / "last.pt", homo, tmp_path, nodes_at_once=50))
    assert "sampled" not in result.files and result.fanouts is None
    with pytest.raises(SettingsError, match="is run layer by layer, with all neighbours; leave them out"):
        infer(InferJob(run / "checkpoints" / "last.pt", homo, tmp_path, fanouts=(-1, -1)))
    with gf.open(homo) as opened:
        x, edge_index = whole_graph(opened)
    with torch.no_grad():
        expected = gf.load_model(run)(x, edge_index)
    torch.testing.assert_close(written(tmp_path, 2), expected, atol=1e-4, rtol=1e-4)


def whole_graph(opened: gf.Graph):
    """Return features and edges of all nodes, by original id."""
    loader = gf.DistNeighborLoader(opened, [-1], torch.arange(600), batch_size=600)
    (batch,) = loader
    x = torch.empty(600, batch.x.shape[1])
    x[batch.n_id] = batch.x.float()
    return x, batch.n_id[batch.edge_index]


def on_all_nodes(model: Any) -> dict[str, torch.Tensor]:
    """Return what a model of a typed graph computes on the whole graph, from its dataset."""
    data = load_dataset("synthetic-hetero", options=SMALL)
    x = {of: torch.from_numpy(nodes.attrs["x"]) for of, nodes in data.nodes.items() if "x" in nodes.attrs}
    n_id = {of: torch.arange(nodes.num_nodes) for of, nodes in data.nodes.items()}
    edges = {of: torch.from_numpy(np.array(some.edge_index)).long() for of, some in data.edges.items()}
    rows = model.input_rows(SimpleNamespace(x=x, n_id=n_id, categories={}))
    return model.own(rows, {of: edges[of] for of in model.call.edge_types})


def written(out: Path, parts: int) -> torch.Tensor:
    """Return the model's output that ``infer`` wrote, in the order of original ids."""
    folders = [out / f"part{part}" for part in range(parts)]
    ids = np.concatenate([np.load(folder / "orig_id.npy") for folder in folders])
    rows = np.concatenate([np.load(folder / "logits.npy") for folder in folders])
    return torch.from_numpy(rows[np.argsort(ids)])


@pytest.mark.parametrize(
    "case",
    fast_cases(["homo/Own", "hetero/Typed", "hetero/torch_geometric.nn.GraphSAGE", "links", "degrees"], "hetero/Typed"),
)
def test_inference_of_other_classes_uses_sampled_neighbours_and_says_so(
    case: str, homo: Path, hetero: Path, alone: Path, tmp_path: Path
) -> None:
    saved = alone / case / "checkpoints" / "last.pt"
    parts = hetero if case.startswith(("hetero", "links")) else homo
    first, again = (infer(InferJob(saved, parts, tmp_path / str(size), nodes_at_once=size)) for size in (64, 1000))
    fanouts = FANOUTS.get(case.partition("/")[0], (5, 5))
    assert f"was run on sampled neighbours {fanouts}, as in evaluation" in first.files
    assert first.metrics == again.metrics
    if "/" in case:
        every = infer(InferJob(saved, parts, tmp_path / "every", nodes_at_once=150, fanouts=(-1, -1)))
        assert every.files.endswith("was run on all neighbours") and every.fanouts == (-1, -1)
        model = gf.load_model(alone / case)
        with gf.open(homo) as opened, torch.no_grad():
            expected = model(*whole_graph(opened)) if parts == homo else on_all_nodes(model)["paper"]
        torch.testing.assert_close(written(tmp_path / "every", 2), expected, atol=1e-4, rtol=1e-4)
    if case != "links":
        torch.testing.assert_close(written(tmp_path / "64", 2), written(tmp_path / "1000", 2), atol=1e-5, rtol=1e-5)
        assert 0 < first.metrics["test"]["accuracy"] <= 1


def random_graph(**attrs: Any):
    splits = {"train": range(0, 120), "val": range(120, 160), "test": range(160, 200)}
    return graph(np.random.default_rng(0).integers(0, 200, (800, 2)), 200, splits=splits, **attrs)


def test_nodes_without_features_have_trainable_rows(sources: Path, tmp_path: Path) -> None:
    data = random_graph(attrs={"y": np.arange(200) % 3})
    write_partition(data, assign_parts(data, 2, "hash"), tmp_path / "parts")
    one = job(tmp_path / "parts", tmp_path / "one", model=named(sources, "Own"), epochs=2, fanouts=(3, 3))
    train(one, Ranks())
    saved = gf.load_checkpoint(tmp_path / "one" / "checkpoints" / "last.pt")
    assert saved.built_from["rows"] == {"node": 200}
    (ended, *others) = run_ranks(2, job(tmp_path / "parts", tmp_path / "two", model=named(sources, "Own"), epochs=2,
                                        fanouts=(3, 3)))  # fmt: skip
    assert ended.returncode == 0, ended.output
    np.testing.assert_allclose(curve(tmp_path / "two"), curve(tmp_path / "one"), rtol=2e-5)


def test_edge_features_reach_a_class_as_weights(sources: Path, tmp_path: Path) -> None:
    data = random_graph(edge_attrs={"edge_weight": np.random.default_rng(1).random(800, np.float32)})
    write_partition(data, assign_parts(data, 1, "hash"), tmp_path / "parts")
    settings = {"model": named(sources, "Weighted"), "fanouts": (3,)}
    train(job(tmp_path / "parts", tmp_path / "run", edge_attr="edge_weight", **settings), Ranks())
    with pytest.raises(SettingsError, match=r"fails on a small batch: .*own_models.py:\d+"):
        train(job(tmp_path / "parts", tmp_path / "none", **settings), Ranks())
    with pytest.raises(SettingsError, match="edge_attr: model Noisy does not read|edge_attr: model Own does not read"):
        train(job(tmp_path / "parts", tmp_path / "no", edge_attr="edge_weight", model=named(sources, "Own")), Ranks())


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("nothing.py:Own", {}, "there is no file nothing.py in "),
        ("Nothing", {}, r"Nothing in .*own_models.py does not exist; it has Own, Typed, "),
        ("act", {}, r"act in .*own_models.py is a function; give a class of torch.nn.Module whose constructor does"),
        ("SIZE", {}, r"SIZE in .*own_models.py is no class of torch.nn.Module"),
        ("no_such_package.Model", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("Lacks", {}, "Lacks needs the argument 'num_feats', which the trainer does not know; give it in model_args"),
        ("Strange", {}, "forward of Strange needs the argument 'features', which the trainer does not know"),
        ("Own", {"width": 2}, "model_args: Own has no argument 'width'; it has in_channels, hidden_channels, "),
    ],
)
def test_a_class_that_does_not_fit_is_refused_without_a_graph(
    model: str, args: dict[str, Any], message: str, sources: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        check_class(named(sources, model), args)


NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.lin(x)
"""
PACKAGED = "from .layers import Linear\n" + NET.replace("nn.Linear", "Linear")
LAYERS = "from torch.nn import Linear\n"
KEYWORDS = """

class All(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.lin = nn.Linear(kwargs["in_channels"], kwargs["out_channels"])
        assert kwargs["num_layers"] == 2 and "heads" in kwargs

    forward = Net.forward


class Sage(pyg.GraphSAGE):
    def __init__(self, p=0.1, **kwargs):
        super().__init__(**kwargs)
        assert self.num_layers == 2


class Lazy(Net):
    def __init__(self, out_channels):
        nn.Module.__init__(self)
        self.lin = nn.LazyLinear(out_channels)


class Unused(Lazy):
    def __init__(self, out_channels):
        super().__init__(out_channels)
        self.other = nn.LazyLinear(3)


class Pair(Net):
    def forward(self, x, edge_index):
        return self.lin(x), x


class Frozen(Net):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.requires_grad_(False)
"""

#: Files of a user, by path, whose first one has the class ``Net``, and what is said about it ('': it works).
FILES = [
    ({"pkg/models.py": PACKAGED, "pkg/__init__.py": "", "pkg/layers.py": LAYERS}, ""),
    ({"models.py": PACKAGED, "layers.py": LAYERS}, "ImportError: .*make its folder a package by an empty file __init"),
    ({"models.py": NET + "\n  def (:"}, r"IndentationError: unindent does not match any .* level \(models.py:13\)$"),
    (
        {"models.py": "import not_there"},
        r"No module named 'not_there' \(models.py:1\); install it here and on all hosts",
    ),
    ({"models.py": "import sys; sys.exit(4)"}, r"cannot be imported: SystemExit: 4 \(models.py:1\)"),
    ({"my modèles.py": NET}, ""),
    ({"torch.py": NET}, ""),
    ({"models.py": NET, "torch.py": "raise ValueError", "queue.py": "raise ValueError"}, ""),
]


@pytest.mark.parametrize(
    ("files", "message"), FILES, ids=[f"{next(iter(files))}-{n}" for n, (files, _) in enumerate(FILES)]
)
def test_files_of_users_work_or_are_refused_in_one_line(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    model = f"{tmp_path / next(iter(files))}:Net"
    if message:
        with pytest.raises(SettingsError, match=message):
            check_class(model, {})
        return
    check_class(model, {})
    save_sources(load_class(model), tmp_path / "files")
    wanted = {name for name in files if "raise" not in files[name]}
    assert {path.relative_to(tmp_path / "files").as_posix() for path in (tmp_path / "files").rglob("*.py")} == wanted
    settings = TrainSettings(model=relative_name(model), fanouts=(4, 3))
    assert type(build_own(settings, homogeneous(), None, [tmp_path / "files"]).own) is not load_class(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("All", ""),
        ("Sage", ""),
        ("Lazy", ""),
        ("Unused", "Unused never uses other.weight, so its shape is unknown; leave it out"),
        ("Pair", r"forward of Pair must return rows of all nodes .*: \[n, 4\]; it returns tuple"),
        ("Frozen", "the output of Frozen depends on no weights, so it cannot be trained"),
    ],
)
def test_odd_classes_work_or_are_refused_in_one_line(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("import torch_geometric.nn as pyg\n" + NET + KEYWORDS)
    settings = TrainSettings(model=f"{tmp_path}/odd.py:{name}", fanouts=(4, 3), hidden=16)
    if message:
        with pytest.raises(SettingsError, match=message):
            build_own(settings, homogeneous(), None)
        return
    assert build_own(settings, homogeneous(), None)(small_batch(homogeneous(), 2, False)).shape[1] == 4


def test_each_version_of_a_file_has_its_own_modules(homo: Path, tmp_path: Path) -> None:
    for version in ("1", "2"):
        folder = tmp_path / version
        folder.mkdir()
        (folder / "models.py").write_text(NET + "    from versioned import value\n")
        (folder / "versioned.py").write_text(f"value = {version}\n")
    loaded = [load_class("models.py:Net", [tmp_path / version]) for version in ("1", "2", "1")]
    assert [cls.value for cls in loaded] == [1, 2, 1]
    train(job(homo, tmp_path / "run", model=f"{tmp_path}/1/models.py:Net"), Ranks())
    (tmp_path / "2" / "models.py").write_text(
        NET.replace("self.lin =", "self.other =").replace("self.lin(", "self.other(")
    )
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    assert type(gf.load_model(last)).value == 1
    changed = job(homo, tmp_path / "two", model=f"{tmp_path}/2/models.py:Net", epochs=2, resume=str(last))
    del sys.modules["models"]
    with pytest.raises(
        CheckpointError, match="the checkpoint does not fit the class .*: Missing key.*own.other.weight"
    ):
        train(changed, Ranks())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Wide", r"forward of Wide must return rows of all nodes of the batch, or of its seeds: \[n, 4\]; it returns "),
        (
            "Broken",
            r"Broken fails on a small batch: RuntimeError: .*shapes cannot be multiplied.*\(own_models.py:\d+\)",
        ),
        ("torch_geometric.nn.GCN", None),
    ],
)
def test_a_class_is_run_on_a_small_batch_before_training(
    model: str, message: str | None, sources: Path, homo: Path, tmp_path: Path
) -> None:
    one = job(homo, tmp_path, model=named(sources, model))
    if message is None:
        train(one, Ranks())  # normalises by degrees within the batch, so it runs on the whole batch
        return
    with pytest.raises(SettingsError, match=message):
        train(one, Ranks())


@pytest.mark.parametrize("name", ["GAT", "GIN"])
def test_self_loops_cannot_be_added_between_types(name: str, hetero: Path, tmp_path: Path) -> None:
    one = job(hetero, tmp_path, model=f"torch_geometric.nn.{name}", heads=2)
    if name == "GIN":
        train(one, Ranks())
        return
    with pytest.raises(SettingsError, match="add self loops, which edges between two types"):
        train(one, Ranks())


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ("GraphSAGE", {}),
        ("GraphSAGE", {"jk": "cat", "norm": "batch_norm", "act": "elu"}),
        ("GraphSAGE", {"aggr": "max", "act_first": True}),
        ("GraphSAGE", {"project": True}),
        ("GAT", {"v2": True, "jk": "max"}),
        ("GIN", {"train_eps": True}),
        ("PNA", {"towers": 1}),
    ],
)
def test_models_of_torch_geometric_on_blocks_equal_those_on_the_whole_batch(model: str, args: dict[str, Any]) -> None:
    settings = TrainSettings(model=f"torch_geometric.nn.{model}", model_args=args, fanouts=(4, 3, 2), hidden=16)
    facts = dataclasses.replace(homogeneous(), degrees=(0, 5, 7, 30, 9))
    built = build_own(settings, facts, None)
    assert built.call.on_blocks
    batch = small_batch(facts, 3, False)
    assert isinstance(batch, Batch)
    built.eval()
    whole = built.own(batch.x, edge_index_of(batch.blocks[0]))[: batch.num_seeds]
    torch.testing.assert_close(built(batch), whole, atol=1e-5, rtol=1e-5)
    built.train()
    built(batch).square().sum().backward()
    assert all(weight.grad is not None for weight in built.parameters())


def test_a_class_is_made_for_a_graph_without_training(sources: Path, homo: Path, hetero: Path) -> None:
    check_on_graph(TrainSettings(model="torch_geometric.nn.PNA", fanouts=(3, 3), hidden=16), hetero)
    with pytest.raises(SettingsError, match="forward of Wide must return"):
        check_on_graph(TrainSettings(model=named(sources, "Wide"), fanouts=(3,)), homo)


def test_a_typed_class_also_reads_a_graph_without_types(sources: Path, homo: Path, tmp_path: Path) -> None:
    train(job(homo, tmp_path, model=named(sources, "Typed"), heads=2), Ranks())
    assert len(curve(tmp_path)) == 3


def test_bfloat16_changes_the_curve_only_a_little(sources: Path, homo: Path, alone: Path, tmp_path: Path) -> None:
    more = {"epochs": 1, "dropout": 0.5, "heads": 2, "precision": "bfloat16", "fanouts": FANOUTS["homo"]}
    train(job(homo, tmp_path, model="torch_geometric.nn.GraphSAGE", **more), Ranks())
    ours, theirs = curve(tmp_path), curve(alone / "homo/torch_geometric.nn.GraphSAGE")
    assert ours != theirs
    np.testing.assert_allclose(ours, theirs, rtol=0.05)


def test_batch_norm_is_said_to_depend_on_processes(homo: Path, tmp_path: Path, capsys) -> None:
    args = {"norm": "batch_norm"}
    train(job(homo, tmp_path, model="torch_geometric.nn.GraphSAGE", model_args=args), Ranks())
    assert "BatchNorm normalises each process's share of a batch" in capsys.readouterr().out


def test_arguments_of_a_class_have_names() -> None:
    with pytest.raises(SettingsError, match="model_args is 'elu'; it must be keys with values"):
        TrainSettings(model="models.py:Own", model_args="elu")  # type: ignore[arg-type]
