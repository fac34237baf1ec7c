"""The kinds of faults that tests inject into runs, the report expected for each kind, and random draws of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

NODES = 4

#: A user script whose ranks call all_reduce in every step, as in data-parallel training. A rank fails as soon as the
#: file /tmp/fault-rankN exists; the file contains the kind of the fault.
JOB = """
import ctypes, json, os, sys, time, torch, torch.distributed as dist
rank, steps, folder = int(os.environ["RANK"]), int(sys.argv[1]), os.environ["GNNFLEET_RUN_DIR"]
dist.init_process_group("gloo")
kept, metrics = [], open(f"{folder}/metrics-rank{rank}.jsonl", "a")
for step in range(steps):
    dist.all_reduce(torch.ones(1000))
    line = {"t": time.time(), "kind": "step", "rank": rank, "epoch": 1, "step": step, "steps": steps, "loss": 1.0}
    line |= {"seeds": 10, "seeds_per_s": 200.0, "wait_s": 0.0}
    print(json.dumps(line), file=metrics, flush=True)
    print("step", step, flush=True)
    fault = f"/tmp/fault-rank{rank}"
    if os.path.exists(fault):
        kind = open(fault).read()
        os.remove(fault)
        if kind == "exception":
            raise ValueError("no such column: age")
        if kind == "exit":
            sys.stdout.flush()
            os._exit(3)
        if kind == "segfault":
            ctypes.string_at(0)
        while kind == "memory":
            kept.append(bytearray(os.urandom(1 << 20)) * 32)
    time.sleep(0.05)
dist.barrier()
"""


@dataclass(frozen=True)
class Fault:
    """One fault on one host. It is injected once the job has done ``step`` steps (-1: as soon as the ranks start)."""

    kind: str
    node: int
    step: int
    clock: int | None = None  #: node rank of a host whose clock is five minutes off
    crowded: bool = False  #: the node runs two ranks, and the second one fails
    detached: bool = False  #: the launcher detaches before the fault
    bundled: bool = False  #: the run uses the bundled trainer instead of a user script

    def __str__(self) -> str:
        moment = "detached" if self.detached else "at start" if self.step < 0 else f"step {self.step}"
        crowded = ", second rank" if self.crowded else ""
        clock = "" if self.clock is None else f", clock of node{self.clock} off"
        return f"{self.kind} on node{self.node}, {moment}{crowded}{clock}{', bundled trainer' if self.bundled else ''}"

    @property
    def procs(self) -> list[int]:
        """Return the number of ranks of each node."""
        return [2 if self.crowded and k == self.node else 1 for k in range(NODES)]

    @property
    def ranks(self) -> range:
        """Return the ranks of the faulty node."""
        return range(self.node, self.node + self.procs[self.node])

    @property
    def victim(self) -> str:
        """Return the name of the process that fails, as in outcomes, e.g. ``rank2``."""
        return f"rank{self.ranks[-1]}"


#: Kind of fault -> the report expected for it: which of rank, server and node is named as the first failure; texts of
#: which the reason contains at least one; the least exit status.
EXPECTED: dict[str, tuple[str, tuple[str, ...], int]] = {
    "kill": ("rank", ("was killed by signal 9 (SIGKILL)",), 137),
    "server": ("server", ("was killed by signal 9 (SIGKILL)",), 137),
    "exception": ("rank", ("raised ValueError: no such column: age",), 1),
    "exit": ("rank", ("ended with exit status 3",), 3),
    "segfault": ("rank", ("crashed: segmentation fault (SIGSEGV)",), 139),
    "memory": ("rank", ("ran out of memory (killed by the kernel",), 137),
    "power": ("node", ("no sign of life", "last sign of life"), 1),
    "network": ("node", ("no sign of life", "no contact"), 1),
    "supervisor": ("node", ("supervisor",), 1),
    "disk": ("rank", ("No space left on device",), 1),
}
KINDS = (*EXPECTED, "launcher", "clock")
TRIGGERED = ("exception", "exit", "segfault", "memory")  # faults that the job causes itself, triggered by a file
UNREACHABLE = ("power", "network")  # faults that make the host unreachable
_SCRIPT_ONLY = (*TRIGGERED, "disk")


def draw(count: int, seed: int) -> list[Fault]:
    """Draw ``count`` random faults; no kind is drawn again before every kind has been drawn."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        faults += [_one(kind, chance) for kind in chance.sample(KINDS, len(KINDS))]
    return faults[:count]


def _one(kind: str, chance: random.Random) -> Fault:
    early = kind not in _SCRIPT_ONLY and chance.random() < 0.2
    return Fault(
        kind,
        chance.randrange(NODES),
        -1 if early else chance.choice([2, 8, 25]),
        clock=chance.randrange(NODES) if chance.random() < 0.3 else None,
        crowded=chance.random() < 0.3,
        detached=kind != "launcher" and chance.random() < 0.3,
        bundled=kind not in _SCRIPT_ONLY and chance.random() < 0.4,
    )
