"""Test kit for ``gnnfleet status``, ``stop`` and the like: a run with real supervisors, but without a launcher."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.command import Command
from launcher.config.loader import to_yaml
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.plan.model import LaunchPlan
from launcher.plan.serialize import run_json
from launcher.report.launch_file import LaunchFile, Stage
from launcher.report.run_folder import register
from node_kit import PYTHON, ROOT, SUPERVISOR, RunFolder
from run_kit import make_launch, make_node
from waiting import wait_until

#: A user script that prints its rank, writes metrics as the trainer does, then sleeps until it is stopped.
TRAINS = """
import json, os, time
rank = int(os.environ["RANK"])
print("here is rank", rank, flush=True)
with open(os.path.join(os.environ["GNNFLEET_RUN_DIR"], f"metrics-rank{rank}.jsonl"), "a") as file:
    step = {"t": time.time(), "kind": "step", "rank": rank, "epoch": 4, "step": 12, "steps": 40, "loss": 0.5}
    file.write(json.dumps({**step, "seeds": 10, "seeds_per_s": 1234.0, "remote_share": 0.25}) + chr(10))
time.sleep(300)
"""


class LocalRun:
    """A run of local nodes with one rank each. All its files are below ``top``."""

    def __init__(self, top: Path, run_id: str = "r1", num_nodes: int = 2):
        self.top, self.run_id = top, run_id
        self.unreachable: tuple[int, ...] = ()  #: nodes that cannot be reached
        self.folder = top / "runs" / run_id
        self.plan = self._plan(num_nodes)
        self.config = ClusterConfig(
            nodes=tuple(NodeConfig("localhost", workdir=node.workdir) for node in self.plan.nodes),
            data=DataConfig("synthetic", folder=str(top / "parts")),
            transport="local",
            name="toy",
        )
        self.nodes = [RunFolder(Path(node.run_dir), **self._spec(node.node_rank)) for node in self.plan.nodes]
        for node in self.plan.nodes:
            (Path(node.run_dir) / "run.json").write_text(run_json(self.plan))

    def _plan(self, num_nodes: int) -> LaunchPlan:
        nodes = []
        for k in range(num_nodes):
            node = make_node(self.top / "nodes", k, [])
            start = Command((PYTHON, str(SUPERVISOR), f"{node.run_dir}/node.json"), {}, node.run_dir)
            run_dir = f"{node.workdir}/runs/{self.run_id}/node{k}"
            session = f"gnnfleet-{self.run_id}-node{k}"
            nodes.append(replace(node, code_dir=str(ROOT), run_dir=run_dir, start=start, session=session))
        return replace(make_launch(nodes), run_id=self.run_id)

    def _spec(self, k: int) -> dict[str, Any]:
        return {"run_id": self.run_id, "node_rank": k, "num_nodes": len(self.plan.nodes)}

    def launched(self, stage: Stage, *, alive: bool = False, **more: Any) -> LocalRun:
        """Write the files of a launch that has reached ``stage``.

        alive: whether launch.json names a launcher that still runs. more: values that replace those in launch.json.
        """
        launch_file = LaunchFile.mine(self.run_id, "toy", config="cluster.yml").at(stage)
        gone = {} if alive else {"start_ticks": 1}
        replace(launch_file, **{**gone, "user": "alice", **more}).write(self.folder)
        (self.folder / "config.yml").write_text(to_yaml(self.config))
        if stage not in ("connect", "preflight", "partition"):
            (self.folder / "run.json").write_text(run_json(self.plan))
        register(self.run_id, self.folder)
        return self

    def start(self, code: str = TRAINS, *only: int) -> LocalRun:
        """Start the supervisors of nodes ``only`` (default: all), each with one rank that runs ``code``."""
        for k, node in enumerate(self.nodes):
            if not only or k in only:
                env = {"RANK": str(k), "GNNFLEET_RUN_DIR": str(node.path)}
                node.rank([sys.executable, "-c", code], env)
                node.own["ranks"] = [k]
                node.start()
        return self

    def await_training(self, *only: int) -> None:
        """Wait until the nodes ``only`` (default: all) have recorded a training step."""
        for k, node in enumerate(self.nodes):
            if not only or k in only:
                path = node.path / "state.json"
                wait_until(lambda path=path: path.exists() and json.loads(path.read_text()).get("ranks"))

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()
