"""What ``train.precision: bfloat16`` is expected to bring on the processors and devices of the nodes that train."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from launcher.config.resolve import ResolvedConfig
from launcher.plan.model import NodeFacts
from launcher.text import spans

#: Names of NVIDIA devices of a compute capability below 8.0, which compute in bfloat16 by way of float32.
_OLD_DEVICE = re.compile(r"\b([KPV]\d{1,3}|M\d{2,3}|T\d{1,4}|GTX|TITAN|RTX 20\d\d|Quadro (GV|GP|RTX|P|M|K)\w*)\b")


def precision_notes(config: ResolvedConfig, facts: Mapping[int, NodeFacts]) -> Iterable[str]:
    """Yield a note for each kind of node: whether bfloat16 pays there. Nodes without facts are left out."""
    kinds: dict[str, list[int]] = {}
    for k, node in enumerate(config.nodes):
        if node.trains and k in facts:
            kinds.setdefault(_expected(facts[k], bool(node.devices)), []).append(k)
    for text, nodes in kinds.items():
        if text:
            yield f"precision bfloat16 on {spans(nodes, 'node')}: {text}"
    if not kinds:
        yield (
            "precision bfloat16 pays only on processors and devices that multiply it (avx512_bf16, amx_bf16, compute "
            "capability 8.0); preflight looks for them at launch"
        )


def _expected(facts: NodeFacts, on_devices: bool) -> str:
    if on_devices:
        old = next(filter(_OLD_DEVICE.search, facts.devices), None)
        return f"{old} has no units for it, so steps are probably slower than in float32" if old else ""
    if facts.bfloat16 is None:
        return ""
    if not facts.bfloat16:
        return (
            "the processor has no instructions for it (avx512_bf16, amx_bf16), so steps are probably slower than in "
            "float32; leave train.precision out"
        )
    return (
        f"the processor multiplies it ({facts.bfloat16}); an epoch took 8 % less time where this was measured, for a "
        "third more memory"
    )
