"""Ranks all targets for every source (`infer --top-k`), beside a plain PyTorch loop over the same embeddings.

200,000 users, 100,000 items, 20 links of each user, which are left out; embeddings of width 64; 20 items listed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import HeteroData

from table import Row
from trainer.core.ranks import Ranks, join_ranks
from trainer.data.memory import dataset_of
from trainer.graph.open import open_graph
from trainer.nn.layerwise_inference import LayerRows, WholeGraph
from trainer.nn.link_embeddings import LinkEmbeddings
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.job import layout_of

LIKES = ("user", "likes", "item")
WIDTH, LISTED, OF_EACH = 64, 20, 20


def run(small: bool) -> list[Row]:
    users, items = (2_000, 1_000) if small else (200_000, 100_000)
    rng = np.random.default_rng(0)
    links = np.stack([np.repeat(np.arange(users), OF_EACH), rng.integers(0, items, users * OF_EACH)])
    rows = [rng.standard_normal((count, WIDTH), np.float32) for count in (users, items)]
    data = HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = users, items
    data[LIKES].edge_index = torch.from_numpy(links)
    dataset = dataset_of(data, "ranking")
    with tempfile.TemporaryDirectory() as folder:
        write_partition(dataset, assign_parts(dataset, 1, "hash"), folder)
        with open_graph(folder) as graph, join_ranks(Ranks.from_env({}), torch.device("cpu"), "gloo", 60) as group:
            whole, both = WholeGraph(graph, layout_of(graph, group), group, Path(folder)), []
            for of, values in zip(("user", "item"), rows, strict=True):
                path = Path(folder, f"{of}.npy")
                np.save(path, values[np.asarray(orig_ids(graph, of))])
                both.append(LayerRows(whole.shares[of], np.load(path, mmap_mode="r")))
            embeddings = LinkEmbeddings(graph, LIKES, group, *both)
            embeddings.best_targets(LISTED) if small else None
            before = memory(reset=True)
            ours, best = timed(lambda: embeddings.best_targets(LISTED))
            used = memory() - before
            order = np.asarray(orig_ids(graph, "user"))
            theirs, plain = timed(lambda: plain_loop(*map(torch.from_numpy, (*rows, links))))
    same = float((best[0] == plain[order]).mean())
    text = f"plain loop ({same:.2%} of the listed items are the same)"
    return [
        Row("best 20 of all items for each user", ours, "s", text, theirs),
        Row("memory for it", used / 1e6, "MB"),
    ]  # fmt: skip


def orig_ids(graph: Any, of: str) -> Any:
    from trainer.sampler.types import RowRequest

    wanted = RowRequest(of, np.arange(graph.manifest.nodes[of].num_nodes), ("orig_id",))
    return graph.access.gather([wanted])[0]["orig_id"]


def plain_loop(users: torch.Tensor, items: torch.Tensor, links: torch.Tensor) -> Any:
    found = []
    for begin in range(0, len(users), 1024):
        scores = users[begin : begin + 1024] @ items.t()
        here = slice(*np.searchsorted(links[0].numpy(), [begin, begin + 1024]))
        scores[links[0, here] - begin, links[1, here]] = -torch.inf
        found.append(scores.topk(LISTED).indices)
    return torch.cat(found).numpy()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def memory(reset: bool = False) -> int:
    """Return the largest memory of this process so far, in bytes. ``reset``: begin anew, and return the current."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])
