"""Test kit for restarts: runs without a launcher, with ranks that write metrics and checkpoints without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from node_kit import RunFolder, python
from peers_kit import Run
from ports import free_port
from waiting import DEADLINE, wait_until

#: A rank that counts steps from its checkpoint on. It ends once the file ``../go``, or that in its argument, exists. It
#: fails at the step in ``FAIL_AT``, which is counted over all attempts.
TRAIN = """
import hashlib, json, os, pathlib, sys, time
run, rank, world = pathlib.Path(os.environ["GNNFLEET_RUN_DIR"]), os.environ["RANK"], os.environ.get("WORLD_SIZE")
resume, attempt = os.environ.get("GNNFLEET_RESUME"), os.environ.get("GNNFLEET_RESTART", "0")
step = int(pathlib.Path(resume).read_bytes()[:-73]) if resume and rank == "0" else 0
print("up", "attempt", attempt, "rank", rank, "of", world, "step", step, flush=True)
while not os.path.exists(sys.argv[1] if len(sys.argv) > 1 else run / "../go"):
    if str(step) == os.environ.get("FAIL_AT"):
        raise SystemExit(3)
    step += 1
    with open(run / f"metrics-rank{rank}.jsonl", "a") as file:
        line = {"t": time.time(), "kind": "step", "rank": int(rank), "epoch": 1, "step": step, "steps": 9999}
        print(json.dumps({**line, "loss": 1.0}), file=file)
    if os.environ["LOCAL_RANK"] == "0":
        data = str(step).encode()
        comment = b"sha256:" + hashlib.sha256(data).hexdigest().encode()
        (run / f"checkpoints/epoch-0000-step-{step:06d}.pt").write_bytes(data + b"G\\0" + comment)
    time.sleep(0.1)
"""


class RestartRun(Run):
    def __init__(self, folder: Path, count: int, *, restarts: int = 3, **more: Any) -> None:
        super().__init__(folder, count, argv=python(TRAIN), **more)
        for k, node in enumerate(self.nodes):
            node.spec["restarts"] = restarts
            control = 0 if count == 1 else self.port if k == self.lead else free_port()
            node.own.update({"control_port": control, "master_port": free_port()})

    def stepping(self) -> RestartRun:
        self.start(up=False)
        for node in self.nodes:
            if node.spec["trainer"]:
                wait_until(lambda folder=node.path / "checkpoints": any(folder.glob("epoch-*.pt")))
        wait_until(lambda: len(self.nodes) == 1 or self.met())
        return self

    def finish(self, without: tuple[int, ...] = ()) -> dict[int, dict[str, Any]]:
        """Let all ranks succeed; return the results by node_rank, except of the nodes ``without``."""
        (self.nodes[0].path.parent / "go").touch()
        return self.results(without)

    def results(self, without: tuple[int, ...] = ()) -> dict[int, dict[str, Any]]:
        """Wait for the end of all nodes except ``without``; return their results by node_rank."""
        return {k: node.end() for k, node in enumerate(self.nodes) if k not in without}


def await_attempt(
    node: RunFolder, rank: int, generation: int = 1, world: int | None = None, seconds: float = DEADLINE
) -> int:
    """Wait until ``rank`` runs in the attempt after ``generation`` restarts. Return the rank's first step in it.

    world: number of ranks in this attempt, or None for any.
    """
    words = f"up attempt {generation} rank {rank} of {'' if world is None else world}"
    wait_until(node.says(f"rank{rank}", words), seconds)
    line = next(line for line in node.log(f"rank{rank}") if line.startswith(words))
    return int(line.rpartition(" ")[2])


def restarts(node: RunFolder) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((node.path / "state.json").read_text())["restarts"]
    return found
