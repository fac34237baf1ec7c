"""Random scenarios of the soak (``make soak``): hosts, mode, sampler and script of a run, and one fault.

The seed determines the scenario. With n kinds of faults, the seeds 0 to n - 1 have each kind once, and so have the next
n seeds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

HOSTS = 4
NUM_PARTS = 4  # parts of every graph; a run resumes with them on fewer or more hosts
ENDLESS = 100_000  # number of epochs of a run that only a fault or the user ends
PEER_TIMEOUT = 6.0  # seconds; the default of run.peer_timeout
STALL_AFTER = 6.0  # seconds; run.stall_after of scenarios that suspend a rank
MAX_RANKS = 5

#: Graph -> dataset and options of the section ``data`` of its cluster.yml.
GRAPHS: dict[str, dict[str, Any]] = {
    "homogeneous": {
        "dataset": "synthetic",
        "options": {"num_nodes": 3000, "avg_degree": 8, "num_classes": 5, "num_features": 8}
        | {"edge_weight": True, "time": True},
    },
    "heterogeneous": {
        "dataset": "synthetic-hetero",
        "options": {"num_nodes": 2000, "num_classes": 5, "num_features": 8, "edge_weight": True, "time": True},
    },
}

#: Kind of fault -> texts of which the reason in the report contains at least one, and the least exit status. A run
#: with any other fault trains on.
REASONS: dict[str, tuple[tuple[str, ...], int]] = {
    "kill": (("was killed by signal 9 (SIGKILL)",), 137),
    "exception": (("raised ValueError: no such column: age",), 1),
    "exit": (("ended with exit status 3",), 3),
    "segfault": (("crashed: segmentation fault (SIGSEGV)",), 139),
    "memory": (("ran out of memory (killed by the kernel",), 137),
    "disk": (("No space left on device",), 1),
    "stop": (("is stopped (SIGSTOP or a debugger)",), 1),
    "power": (("no sign of life", "last sign of life"), 1),
    "network": (("no sign of life", "no contact"), 1),
    "supervisor": (("supervisor",), 1),
}
# "blip" is a network cut shorter than run.peer_timeout, "returns" a longer one of a server whose parts another has
SURVIVED = ("blip", "returns", "ssh", "launcher", "clock")
# "damaged" is a flipped byte in a part, which the next launch finds and the one after it repairs, "twice" two launches
# at once, of which one makes the parts
LAUNCHES = ("none", "damaged", "twice")
KINDS = ("kill", "server", *list(REASONS)[1:], *SURVIVED, *LAUNCHES)
TRIGGERED = ("exception", "exit", "segfault", "memory")  # the user script causes these itself
SCRIPT_ONLY = (*TRIGGERED, "disk")
NODE_KINDS = ("power", "network", "supervisor")  # faults for which the report names the node, not a rank
UNREACHABLE = ("power", "network")


@dataclass(frozen=True)
class Fault:
    kind: str
    node: int
    second: bool = False  #: whether the fault hits the second rank of the node, not the first
    epoch: int = 0  #: the fault is injected while this epoch is trained; 0: as soon as the ranks have started
    seconds: float = 0.0  #: duration of a network cut


@dataclass(frozen=True)
class Scenario:
    """A run and its fault. Servers have the first node ranks."""

    seed: int
    servers: int  #: number of server nodes; 0: worker mode
    procs: tuple[int, ...]  #: number of processes of each node that trains
    replicas: int
    graph: str
    own: bool  #: whether a user script runs instead of the bundled trainer
    sampler: dict[str, Any]  #: settings of the section ``train``
    topology: str
    cache: str
    shell: str  #: what the shells of the hosts print; see SHELLS
    clock: int | None  #: node rank of a host whose clock is five minutes off
    detached: bool
    resume: str  #: number of hosts of the resumed run: same, fewer, more; '' if the run is not resumed
    restarts: int  #: run.restarts; 0 if the run cannot start again after its fault
    fault: Fault

    @property
    def nodes(self) -> int:
        return self.servers + len(self.procs)

    @property
    def lead(self) -> int:
        return self.servers

    @property
    def mode(self) -> str:
        return "servers" if self.servers else "workers"

    def ranks(self, node: int) -> range:
        """Return the ranks of a node, or an empty range for a server."""
        k = node - self.servers
        if k < 0:
            return range(0)
        first = sum(self.procs[:k])
        return range(first, first + self.procs[k])

    @property
    def victim(self) -> int:
        """Return the rank that the fault hits, or -1 if it hits a graph server."""
        ranks = self.ranks(self.fault.node)
        return ranks[-1 if self.fault.second else 0] if ranks else -1

    @property
    def survives(self) -> bool:
        """Return whether the run continues after the fault, with or without a restart."""
        return self.starts_again or self._undisturbed

    @property
    def starts_again(self) -> bool:
        return self.restarts > 0 and not self._undisturbed

    @property
    def _undisturbed(self) -> bool:
        kind, on_server = self.fault.kind, self.fault.node < self.servers
        return kind not in REASONS or (on_server and self.replicas > 1 and kind in NODE_KINDS)

    @property
    def within(self) -> float:
        """Return the seconds after the fault within which all processes of the run must have ended."""
        unnoticed = {"stop": STALL_AFTER + 12.0, "power": PEER_TIMEOUT + 4.0, "network": PEER_TIMEOUT + 4.0}
        unnoticed["disk"] = 10.0  # the last pages of open files can still be written
        return 10.0 + unnoticed.get(self.fault.kind, 0.0)

    @property
    def causes(self) -> set[int]:
        """The nodes of which a report may name one as the first that failed."""
        # Two nodes that lose each other, without a launcher that sees both, cannot know whose network was cut.
        unknown = self.fault.kind == "network" and self.detached and self.nodes == 2
        return {0, 1} if unknown else {self.fault.node}

    @property
    def names(self) -> list[str]:
        if self.fault.kind in NODE_KINDS:
            return ["node"]
        # With a full disk, the first rank that writes fails, which may be any rank of the node.
        ranks = self.ranks(self.fault.node) if self.fault.kind == "disk" else [self.victim]
        return [f"rank{rank}" for rank in ranks]

    def __str__(self) -> str:
        where = f"{self.servers} servers ×{self.replicas}, clients " if self.servers else "workers "
        sampler = " ".join(f"{name}={value}" for name, value in self.sampler.items())
        more = [f"{self.topology}/{self.cache}", sampler, "own script" if self.own else "bundled"]
        more += [f"shell: {self.shell}"] if self.shell != "quiet" else []
        more += [] if self.clock is None else [f"clock of node{self.clock} off"]
        more += ["detached"] if self.detached else []
        more += [f"resumed on {self.resume}"] if self.resume else []
        more += [f"restarts: {self.restarts}"] if self.restarts else []
        fault, moment = self.fault, f"epoch {self.fault.epoch}" if self.fault.epoch else "start"
        length = f" for {fault.seconds:.1f} s" if fault.seconds else ""
        who = f"rank{self.victim} of node{fault.node}" if self.victim >= 0 else f"node{fault.node}"
        return f"{fault.kind}{length} on {who} at {moment}; {where}{self.procs}, {self.graph}, {', '.join(more)}"


#: Kind of shell -> its .bashrc, which bash also reads for commands over SSH.
SHELLS = {
    "quiet": "",
    "line": "echo 'Welcome to this machine'\n",
    "no newline": "printf 'loading modules ...'\n",
    "title": "printf '\\033]0;%s\\007' \"$HOSTNAME\"; echo error >&2\n",
}


def draw(seed: int, kinds: tuple[str, ...] = KINDS) -> Scenario:
    turn, position = divmod(seed, len(kinds))
    kind = random.Random(turn).sample(kinds, len(kinds))[position]
    chance = random.Random(1_000_003 * seed + 17)
    servers = 2 if kind == "returns" else chance.choice([0, 0, 0, 1, 2])
    trains = chance.randint(1, 2) if servers else chance.randint(2, HOSTS)
    procs = _procs(trains, chance)
    replicas = 2 if kind == "returns" else chance.randint(1, servers) if servers else 1
    own = kind in SCRIPT_ONLY or chance.random() < 0.4
    graph = "homogeneous" if own or chance.random() < 0.6 else "heterogeneous"
    fault = _fault(kind, servers, procs, chance)
    detached = kind not in ("launcher", "ssh", "damaged", "twice") and chance.random() < 0.25
    nodes = servers + trains
    resume = chance.choice(["", "same", "fewer", "more"]) if kind not in ("clock", *LAUNCHES) else ""
    if (resume == "more" and nodes == HOSTS) or (resume == "fewer" and trains == 1):
        resume = "same"
    sampler = _sampler(own, chance)
    topology, cache = chance.choice(["auto", "replicated", "partitioned"]), chance.choice(["10%", "0", "64KB"])
    shell = chance.choice(["quiet", *SHELLS])
    clock = chance.randrange(nodes) if chance.random() < 0.25 else None
    restarts = chance.randint(1, 3) if chance.random() < 0.5 and _can_start_again(fault, servers, trains) else 0
    if restarts:
        replicas = min(2, servers or trains)
    return Scenario(
        seed, servers, procs, replicas, graph, own, sampler, topology, cache, shell, clock, detached, resume, restarts,
        fault,
    )  # fmt: skip


def _can_start_again(fault: Fault, servers: int, trains: int) -> bool:
    if fault.kind not in REASONS or fault.kind == "disk" or not fault.epoch:
        return False  # no process was lost, the disk stays full, or no step was trained yet
    if fault.kind not in NODE_KINDS:
        return True
    if fault.kind == "network" and servers + trains == 2:
        return False  # each of the two nodes would continue without the other
    return servers != 1 and trains > 1 if fault.node < servers or not servers else trains > 1


def _procs(trains: int, chance: random.Random) -> tuple[int, ...]:
    procs = [1] * trains
    for k in range(trains):
        if sum(procs) < MAX_RANKS and chance.random() < 0.35:
            procs[k] = 2
    return tuple(procs)


def _fault(kind: str, servers: int, procs: tuple[int, ...], chance: random.Random) -> Fault:
    nodes = servers + len(procs)
    node = chance.randrange(nodes)
    if kind in (*SCRIPT_ONLY, "kill", "stop"):  # faults of a rank
        node = chance.randrange(servers, nodes)
    elif kind in ("server", "returns", "damaged") and servers:  # of a node that has parts
        node = chance.randrange(servers)
    early = kind not in (*SCRIPT_ONLY, "stop", "blip", "returns") and chance.random() < 0.2
    second = node >= servers and procs[node - servers] > 1 and chance.random() < 0.5
    long, short = chance.uniform(PEER_TIMEOUT + 4, 20), chance.uniform(0.5, PEER_TIMEOUT - 2)
    seconds = {"network": long, "returns": long, "blip": short}
    return Fault(kind, node, second, 0 if early else chance.randint(1, 3), seconds.get(kind, 0.0))


def _sampler(own: bool, chance: random.Random) -> dict[str, Any]:
    """Draw the sampler settings.

    own: whether a user script runs. If so, sampling with more than one hop is disjoint: then the loss is the same for
    any number of ranks.
    """
    sampler: dict[str, Any] = {"fanouts": chance.choice([[5, 5], [3, -1], [8], [-1], [4, 3, 2]])}
    kind = chance.choice(["uniform", "replace", "weighted", "temporal", "latest"])
    if kind == "weighted":
        sampler["weight_attr"] = "edge_weight"
    if kind in ("temporal", "latest"):
        sampler |= {"time_attr": "time", "temporal_strategy": "last" if kind == "latest" else "uniform"}
    if kind == "replace":
        sampler["replace"] = True
    if "time_attr" in sampler or (own and len(sampler["fanouts"]) > 1) or chance.random() < 0.25:
        sampler["disjoint"] = True
    return sampler
