"""Weighted sampling, compared with uniform: draws neighbours with probability proportional to edge weight.

    python -m trainer partition make --dataset synthetic --option edge_weight=true --out parts/weighted
    python examples/weighted_sampling.py --parts parts/weighted

The weights only decide which neighbours are sampled; the model is the same. They have an effect if nodes have more
neighbours than the fanout and the weights are informative. In the synthetic graph, an edge between nodes of one class
has four times the weight of other edges.
"""

from __future__ import annotations

from common import arguments, opened, say
from node_classification import train


def main() -> None:
    options = arguments(__doc__, weight="edge_weight", fanouts="4,4").parse_args()
    with opened(options.parts) as graph:
        say("uniform")
        _, uniform = train(graph, options)
        say(f"by {options.weight}")
        _, weighted = train(graph, options, weight_attr=options.weight)
        say(f"gain by weights {weighted - uniform:+.4f}")


if __name__ == "__main__":
    main()
