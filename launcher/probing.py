"""What preflight asks a node (node/probe.py's request), and what it makes of all answers: a Survey."""

from __future__ import annotations

from typing import Any

from launcher.config import ClusterConfig
from launcher.placement import candidate_ports, node_workdir, run_dir, session_name


def probe_request(config: ClusterConfig, k: int, peer: str = "", run_id: str = "") -> dict[str, Any]:
    """What node ``k`` is asked. ``peer``: an address others have, for a node reached over loopback."""
    node = config.nodes[k]
    local = "127.0.0.1" if config.transport == "local" else ""
    return {
        "address": node.address or local,
        "peer": peer,
        "workdir": node_workdir(node, k),
        "run_dir": run_dir(node_workdir(node, k), run_id, k) if run_id else "",
        "session": session_name(run_id, k) if run_id else "",
        "ports": list(candidate_ports(config, k)),
        "manifest": f"{node.data_folder or config.data.folder}/manifest.json" if config.data.mode == "verify" else "",
    }
