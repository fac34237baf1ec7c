"""The environment of a run's processes: the plan shows it, and the supervisor sets it in every attempt.

Ranks get the environment variables of torchrun, so that ``init_process_group("env://")`` works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.node import procs
from launcher.node.spec import NodeSpec, RunNode

#: Variables that gnnfleet sets for each rank; a node's `env` must not contain them.
RANK_VARIABLES = frozenset(
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"]
    + ["ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"]
    + [f"TORCHELASTIC_{name}" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")]
)


class World:
    """All ranks of one attempt.

    nodes: all nodes of the run, by node_rank. master_addr: address of rank 0; '' for that of its node. generation:
    number of the attempt.
    """

    def __init__(self, run_id: str, nodes: Sequence[RunNode], master_addr: str = "", generation: int = 0) -> None:
        training = sorted((node.ranks, k) for k, node in enumerate(nodes) if node.ranks)
        first = nodes[training[0][1]] if training else RunNode("")
        self.size = sum(len(ranks) for ranks, _ in training)
        self.master_addr, self.master_port = (master_addr or first.address) if training else "", first.master_port
        self._groups = {k: index for index, (_, k) in enumerate(training)}  # among the nodes that train, by node_rank
        self._run_id, self._generation = run_id, generation

    def environment(self, k: int) -> dict[str, str]:
        """Return the variables that are equal for all ranks of node ``k``."""
        return {
            "WORLD_SIZE": str(self.size),
            "ROLE_WORLD_SIZE": str(self.size),
            "ROLE_NAME": "default",
            "GROUP_RANK": str(self._groups.get(k, "")),
            "GROUP_WORLD_SIZE": str(len(self._groups)),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self._run_id,  # libraries check this one to see whether the others are set
            "TORCHELASTIC_RESTART_COUNT": str(self._generation),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 holds the store
            **({"GNNFLEET_RESTART": str(self._generation)} if self._generation else {}),
        }


def rank_environments(spec: NodeSpec) -> dict[int, dict[str, str]]:
    """Return the environment variables of each rank of a node, by rank, without those of ``process_environment``."""
    assert spec.trainer is not None
    env = dict(spec.trainer.get("env", {}))
    if len(spec.ranks) > 1 and "OMP_NUM_THREADS" not in {**os.environ, **env}:
        env["OMP_NUM_THREADS"] = "1"  # as torchrun; otherwise each rank starts a thread per core
    env |= World(spec.run_id, spec.nodes, spec.master_addr, spec.generation).environment(spec.node_rank)
    visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    one_each = len(visible) == len(spec.ranks) > 1 and any(device.startswith("MIG") for device in visible)
    return {
        rank: {
            **env,
            **({"CUDA_VISIBLE_DEVICES": visible[i]} if one_each else {}),  # a process sees one MIG instance at most
            "RANK": str(rank),
            "ROLE_RANK": str(rank),
            "LOCAL_RANK": str(i),
            "LOCAL_WORLD_SIZE": str(len(spec.ranks)),
        }
        for i, rank in enumerate(spec.ranks)
    }


def process_environment(
    spec: NodeSpec, command: Mapping[str, Any], supervisor: str, start_timeout: float
) -> dict[str, str]:
    """Return the environment of a process of a node: variables of the supervisor, of ``command``, and of the run.

    Variables of ``command`` override those of the supervisor, and variables of the run override both. supervisor:
    ``pid:start_ticks`` of this supervisor. start_timeout: seconds in which the node's graph server must be ready.
    """
    return {
        **os.environ,
        **command.get("env", {}),
        "PYTHONFAULTHANDLER": "1",  # the stack of a crash, also of a graph server
        procs.TOKEN: procs.node_token(spec.token, spec.node_rank),
        "GNNFLEET_RUN_ID": spec.run_id,
        "GNNFLEET_RUN_DIR": spec.run_dir,
        "GNNFLEET_PART_IDS": ",".join(map(str, spec.nodes[spec.node_rank].parts)),
        "GNNFLEET_GRACE": str(spec.grace),
        "GNNFLEET_SUPERVISOR": supervisor,
        "GNNFLEET_SERVER_READY": spec.ready_file if spec.server is not None else "",
        "GNNFLEET_START_TIMEOUT": str(start_timeout),
        "NODE_RANK": str(spec.node_rank),
    }
