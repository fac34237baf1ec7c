"""Tests of scripts from torch_geometric's documentation with a gnnfleet loader.

The scripts are strings in this file. The tests replace some lines, to use gnnfleet's loader and several ranks.
"""

from __future__ import annotations

import re
import textwrap

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from train_kit import run_script
from trainer.data.memory import dataset_of
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition

NODES = """
    import torch
    import torch.nn.functional as F
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import GraphSAGE

    torch.manual_seed(12345)
    data = torch.load("data.pt", weights_only=False)

    train_loader = NeighborLoader(data, input_nodes=train_idx, num_neighbors=[10, 10], batch_size=16, shuffle=True)
    test_loader = NeighborLoader(data, input_nodes=test_idx, num_neighbors=[-1, -1], batch_size=32)

    model = GraphSAGE(8, hidden_channels=16, num_layers=2, out_channels=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


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
        return total_loss / total_examples


    @torch.no_grad()
    def test():
        model.eval()
        correct = total = 0
        for batch in test_loader:
            pred = model(batch.x, batch.edge_index)[:batch.batch_size].argmax(dim=-1)
            correct += int((pred == batch.y[:batch.batch_size]).sum())
            total += batch.batch_size
        return correct / total


    for epoch in range(1, 6):
        loss = train()
        print(f"Epoch: {epoch:02d}, Loss: {loss:.4f}, Score: {test():.4f}", flush=True)
"""

HETERO = """
    import torch
    import torch.nn.functional as F
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import SAGEConv, to_hetero

    torch.manual_seed(12345)
    data = torch.load("data.pt", weights_only=False)

    METADATA = (["paper", "author"], [("author", "writes", "paper"), ("paper", "rev_writes", "author")])
    train_loader = NeighborLoader(
        data, num_neighbors=[8] * 2, batch_size=16, input_nodes=("paper", train_idx), shuffle=True,
    )
    test_loader = NeighborLoader(data, num_neighbors=[8] * 2, batch_size=32, input_nodes=("paper", test_idx))


    class GNN(torch.nn.Module):
        def __init__(self, hidden_channels, out_channels):
            super().__init__()
            self.conv1 = SAGEConv((-1, -1), hidden_channels)
            self.conv2 = SAGEConv((-1, -1), out_channels)

        def forward(self, x, edge_index):
            x = self.conv1(x, edge_index).relu()
            return self.conv2(x, edge_index)


    model = to_hetero(GNN(16, 4), METADATA, aggr="sum")

    with torch.no_grad():  # Initialize lazy modules.
        batch = next(iter(train_loader))
        model(batch.x_dict, batch.edge_index_dict)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


    def train():
        model.train()
        total_examples = total_loss = 0
        for batch in train_loader:
            optimizer.zero_grad()
            batch_size = batch["paper"].batch_size
            out = model(batch.x_dict, batch.edge_index_dict)["paper"][:batch_size]
            loss = F.cross_entropy(out, batch["paper"].y[:batch_size])
            loss.backward()
            optimizer.step()
            total_examples += batch_size
            total_loss += float(loss) * batch_size
        return total_loss / total_examples


    @torch.no_grad()
    def test():
        model.eval()
        total_examples = total_correct = 0
        for batch in test_loader:
            batch_size = batch["paper"].batch_size
            pred = model(batch.x_dict, batch.edge_index_dict)["paper"][:batch_size].argmax(dim=-1)
            total_examples += batch_size
            total_correct += int((pred == batch["paper"].y[:batch_size]).sum())
        return total_correct / total_examples


    for epoch in range(1, 6):
        loss = train()
        print(f"Epoch: {epoch:02d}, Loss: {loss:.4f}, Score: {test():.4f}", flush=True)
"""

LINKS = """
    import torch
    import torch.nn.functional as F
    from torch_geometric.loader import LinkNeighborLoader
    from torch_geometric.nn import GraphSAGE

    torch.manual_seed(12345)
    data = torch.load("data.pt", weights_only=False)

    train_loader = LinkNeighborLoader(
        data, num_neighbors=[10, 10], batch_size=128, shuffle=True, neg_sampling_ratio=1.0,
    )

    model = GraphSAGE(8, hidden_channels=32, num_layers=2, out_channels=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


    def train():
        model.train()
        total_loss = correct = total = 0
        for batch in train_loader:
            optimizer.zero_grad()
            h = model(batch.x, batch.edge_index)
            h_src = h[batch.edge_label_index[0]]
            h_dst = h[batch.edge_label_index[1]]
            pred = (h_src * h_dst).sum(dim=-1)
            loss = F.binary_cross_entropy_with_logits(pred, batch.edge_label)
            loss.backward()
            optimizer.step()
            total_loss += float(loss) * pred.size(0)
            correct += int(((pred > 0) == (batch.edge_label > 0.5)).sum())
            total += pred.size(0)
        return total_loss / total, correct / total


    for epoch in range(1, 7):
        loss, score = train()
        print(f"Epoch: {epoch:02d}, Loss: {loss:.4f}, Score: {score:.4f}", flush=True)
"""

#: script -> (text, import line, its replacement, least score)
SCRIPTS = {
    "nodes": (
        NODES, "from torch_geometric.loader import NeighborLoader",
        "import gnnfleet as gf\nfrom gnnfleet import DistNeighborLoader as NeighborLoader", 0.85,
    ),
    "hetero": (
        HETERO, "from torch_geometric.loader import NeighborLoader",
        "import gnnfleet as gf\nfrom gnnfleet import DistNeighborLoader as NeighborLoader", 0.85,
    ),
    "links": (
        LINKS, "from torch_geometric.loader import LinkNeighborLoader",
        "import gnnfleet as gf\nfrom gnnfleet import DistLinkNeighborLoader as LinkNeighborLoader", 0.65,
    ),
}  # fmt: skip
DATA_LINE = 'data = torch.load("data.pt", weights_only=False)'
FROM_PARTS = 'data = gf.open("parts")'
MODEL_LINE = "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)"
#: Lines needed on several ranks with any loader: the first before the data, the second after the model. The last
#: layer of a heterogeneous model has weights that the loss does not depend on, so DDP needs find_unused_parameters.
DDP = (
    'torch.distributed.init_process_group("gloo")\n',
    "model = torch.nn.parallel.DistributedDataParallel(model)\n",
)
#: Seeds as ids, so that the same text works with Data and partitions; users have masks or splits.
SEEDS = "train_idx, test_idx = torch.arange(0, 300), torch.arange(300, 400)\n"


def changed(name, ranks, partition=True):
    text, loader, own_loader, _ = SCRIPTS[name]
    text = textwrap.dedent(text).replace(DATA_LINE, SEEDS + DATA_LINE)
    replaced = {loader: own_loader} | ({DATA_LINE: FROM_PARTS} if partition else {})
    if ranks > 1:
        wrapped = DDP[1] if name != "hetero" else DDP[1].replace("(model)", "(model, find_unused_parameters=True)")
        replaced |= {FROM_PARTS: DDP[0] + FROM_PARTS, MODEL_LINE: wrapped + MODEL_LINE}
    for line, instead in replaced.items():
        assert text.count(line) == 1
        text = text.replace(line, instead)
    return text


def community_data(name):
    """Return a graph of four communities. A node's neighbours predict its community better than its features."""
    g = torch.Generator().manual_seed(3)
    n = 400
    y = torch.randint(0, 4, (n,), generator=g)
    members = [(y == label).nonzero().view(-1) for label in range(4)]
    x = torch.nn.functional.one_hot(y, 8).float() + 1.2 * torch.randn(n, 8, generator=g)
    if name != "hetero":
        dst = torch.randint(0, n, (4000,), generator=g)
        src = _alike(members, y[dst], n, g)
        return Data(x=x, y=y, edge_index=torch.stack([torch.cat([src, dst]), torch.cat([dst, src])]))
    papers = torch.arange(n).repeat(6)
    authors = (y[papers] * 15 + torch.randint(0, 15, (len(papers),), generator=g)) % 60
    authors = torch.where(torch.rand(len(papers), generator=g) < 0.1, torch.randint(0, 60, authors.shape, generator=g),
                          authors)  # fmt: skip
    data = HeteroData()
    data["paper"].x, data["paper"].y = x, y
    data["author"].x = torch.randn(60, 4, generator=g)
    data["author", "writes", "paper"].edge_index = torch.stack([authors, papers])
    data["paper", "rev_writes", "author"].edge_index = torch.stack([papers, authors])
    return data


def _alike(members, labels, n, g):
    own = torch.stack([members[label][torch.randint(0, len(members[label]), (), generator=g)] for label in labels])
    return torch.where(torch.rand(len(labels), generator=g) < 0.1, torch.randint(0, n, labels.shape, generator=g), own)


def scores(output):
    return [tuple(map(float, found)) for found in re.findall(r"Loss: ([\d.]+), Score: ([\d.]+)", output)]


@pytest.mark.parametrize(
    ("name", "source", "ranks"),
    [
        ("nodes", "memory", 1), ("hetero", "partition", 2),
        pytest.param("links", "partition", 2, marks=pytest.mark.slow),
        pytest.param("nodes", "partition", 1, marks=pytest.mark.slow),
        pytest.param("nodes", "partition", 2, marks=pytest.mark.slow),  # test_load_ranks tests nodes on two ranks
        pytest.param("hetero", "memory", 1, marks=pytest.mark.slow),
        pytest.param("hetero", "partition", 1, marks=pytest.mark.slow),
        pytest.param("links", "memory", 1, marks=pytest.mark.slow),
        pytest.param("links", "partition", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_script_learns_with_only_the_loader_lines_changed(tmp_path, name, source, ranks):
    data = community_data(name)
    if source == "memory":
        torch.save(data, tmp_path / "data.pt")
    else:
        dataset = dataset_of(data, "communities")
        write_partition(dataset, assign_parts(dataset, 2, "random"), tmp_path / "parts")
    (tmp_path / "script.py").write_text(changed(name, ranks, source == "partition"))
    for ended in run_script(["script.py"], ranks, tmp_path):
        assert ended.returncode == 0, ended.output
        found = scores(ended.output)
        assert len(found) >= 5 and found[-1][1] > SCRIPTS[name][3], found
        assert found[-1][0] < found[0][0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_more_than_these_lines_differ(name):
    # With one process two lines differ, the import and the data; with two, also the process group and the wrapper.
    original = textwrap.dedent(SCRIPTS[name][0]).splitlines()
    for ranks, more in ((1, 0), (2, 2)):
        lines = [line for line in changed(name, ranks).splitlines() if line + "\n" != SEEDS]
        assert len([line for line in original if line not in lines]) == 2
        assert len([line for line in lines if line not in original]) == 3 + more
