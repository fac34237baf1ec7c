"""Files of a user with a model class of their own, for tests of ``train.model``."""

from __future__ import annotations

from pathlib import Path

HELPERS = """
def act(x):
    return x.relu()
"""

MODELS = """
from torch import nn
from torch.nn import functional
from torch_geometric.nn import GATv2Conv, SAGEConv

from helpers_of_mine import act


class Own(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, dropout, depth=1):
        super().__init__()
        self.first = GATv2Conv(in_channels, hidden_channels, 2, concat=False, dropout=0.2, add_self_loops=False)
        self.second = nn.ModuleList(SAGEConv(hidden_channels, hidden_channels) for _ in range(depth))
        self.head, self.p = nn.Linear(hidden_channels, out_channels), dropout
        self.never_used = nn.Linear(2, 2)

    def forward(self, x, edge_index):
        h = functional.dropout(act(self.first(x, edge_index)), self.p, training=self.training)
        for conv in self.second:
            h = act(conv(h, edge_index))
        return self.head(h)
"""


def write_models(folder: Path, more: str = "") -> str:
    """Write ``own_models.py`` and the module that it imports; return ``FILE.py:CLASS`` for its class ``Own``."""
    (folder / "helpers_of_mine.py").write_text(HELPERS)
    (folder / "own_models.py").write_text(MODELS + more)
    return "own_models.py:Own"
