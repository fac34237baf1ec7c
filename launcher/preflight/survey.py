"""Builds the requests to ``node/programs/probe.py``, and the ``Survey`` from the replies to these requests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import device_packages, extra_packages
from launcher.config.schema import node_workdir
from launcher.node.json_reader import read_json
from launcher.node.programs.packages import size_of
from launcher.plan.files import code_digest
from launcher.plan.placement import is_ip, run_dir, session_name
from launcher.plan.ports import candidate_ports
from launcher.preflight.finding import GraphSize, Survey


@dataclass(frozen=True)
class _LocalParts:
    """Fingerprint and size of the graph in the partition folder on the launching machine."""

    fingerprint: str
    graph: GraphSize


@dataclass(frozen=True)
class Inquiry:
    """Data for the requests of one preflight. Files on the launching machine are read once, for all nodes."""

    config: ResolvedConfig
    run_id: str = ""
    code: str = ""  #: digest of gnnfleet's code
    parts: _LocalParts | None = None  #: partition folder on the launching machine (mode ``sync``)
    all_devices: bool = False  #: also ask nodes without ``devices`` for GPUs

    @classmethod
    def about(cls, config: ResolvedConfig, run_id: str = "") -> Inquiry:
        """Create an Inquiry; reads gnnfleet's code and the partition manifest on the launching machine.

        ``run_id``: id of the run to be launched; nodes report whether they already have its run folder.
        """
        parts = None
        if config.makes_parts:
            missing_or_damaged = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
            with suppress(*missing_or_damaged):
                manifest = read_json(str(Path(config.data.folder).expanduser() / "manifest.json"))
                parts = _LocalParts(manifest["fingerprint"], _graph(size_of(manifest)))
        return cls(config, run_id, code_digest(), parts)

    def request(self, k: int, peer: str = "") -> dict[str, Any]:
        """Return the request to node ``k``.

        ``peer``: address of another node. A node that is reached over loopback reports from which of its addresses it
        would connect to ``peer``.
        """
        config, node, run_id = self.config, self.config.nodes[k], self.run_id
        local = "127.0.0.1" if config.local else ""
        workdir, parts = node_workdir(node, k), node.data_folder or config.data.folder
        names = dict.fromkeys((config.run.master_addr, *(other.address for other in config.nodes)))
        return {
            "address": node.address or local,
            "peer": peer,
            "workdir": workdir,
            "run_dir": run_dir(workdir, run_id, k) if run_id else "",
            "session": session_name(run_id, k) if run_id else "",
            "ports": list(candidate_ports(config, k)),
            "manifest": f"{parts}/manifest.json" if config.data.mode == "verify" and node.holds else "",
            "devices": bool(node.devices) or self.all_devices,
            "packages": [*extra_packages(config, k), *device_packages(node)],
            "names": [name for name in names if name and name != "auto" and not is_ip(name)],
            "code": self.code,
            "parts": f"{workdir}/data/{self.parts.fingerprint}" if self.parts and node.holds else "",
        }

    def survey(
        self,
        probes: Mapping[int, Mapping[str, Any]],
        clock_offsets: Mapping[int, float],
        own_command: bool = False,
        bytes_needed: Mapping[int, int] | None = None,
    ) -> Survey:
        """Build the ``Survey`` from the replies of all nodes.

        ``probes``: the replies, by node_rank. ``own_command``: whether the run starts a user's own command.
        ``bytes_needed``: bytes that the plan stores on each node.
        """
        graph = (
            self.parts.graph
            if self.parts
            else next((_graph(probe["graph"]) for probe in probes.values() if probe["graph"]), None)
        )
        return Survey(self.config, probes, clock_offsets, own_command, bytes_needed or {}, graph, self.code)


def _graph(found: Mapping[str, Any]) -> GraphSize:
    return GraphSize(found["nodes"], found["row_bytes"])
