"""Temporal node classification: no hop samples a neighbour later than the seed.

    python -m trainer partition make --dataset synthetic --option time=true --out parts/temporal
    python examples/temporal_classification.py --parts parts/temporal

Each seed gets its own subgraph (disjoint), because the allowed neighbours depend on its time. --strategy last takes
the latest neighbours instead of random ones. Validation and test nodes of the synthetic graph are later than the train
nodes. Full-graph inference does not apply to such a model: evaluate it by sampling, as this example does.
"""

from __future__ import annotations

from common import arguments, numbers, opened, say, total
from node_classification import train

import gnnfleet as gf


def main() -> None:
    options = arguments(__doc__, time="time", strategy="uniform", batch_size=256).parse_args()
    with opened(options.parts) as graph:
        sampling = {"time_attr": options.time, "temporal_strategy": options.strategy}
        train(graph, options, **sampling)
        for name, rule in [("with time_attr", sampling), ("without", {"disjoint": True})]:
            later, neighbours = look_ahead(graph, options, rule)
            say(f"{name}: {later:.0f} of {neighbours:.0f} sampled nodes are later than their seed")


def look_ahead(graph, options, rule):
    """Sample for all test seeds. Return how many sampled nodes are later than their seed, and how many there are.

    Both numbers leave out the seeds. ``rule``: more arguments of ``DistNeighborLoader``.
    """
    later = neighbours = 0
    for batch in gf.DistNeighborLoader(
        graph, numbers(options.fanouts), "test", batch_size=options.batch_size, attrs=[options.time], **rule
    ):
        time = batch[options.time]
        later += int((time > time[: batch.batch_size][batch.batch]).sum())  # batch.batch: the seed of each node
        neighbours += len(time) - batch.batch_size
    return total(later, neighbours)


if __name__ == "__main__":
    main()
