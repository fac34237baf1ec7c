"""A test of many runs: a rank is killed at a random step, and the run resumes with equal losses.

The killed run has two hosts, the resumed run one to three. Each host has one rank. In mode ``worker``, each host has a
graph server for its parts. In mode ``server-client``, all ranks are clients of two graph servers on other hosts. The
environment variable GNNFLEET_KILLS_TABLE names a file to which a table of the runs is written.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from gateway_kit import HALVES, serving_parts
from kill_kit import train_until
from ports import free_port
from test_script_checkpoint import SCRIPT
from train_kit import Ended, command_line, curve, finish_all, job, rank_environment, start_script, write_parts
from trainer.train.checkpoint import load_checkpoint, load_content

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = 17

BEFORE = 2  # training hosts of the killed run

MODES = ("worker", "server-client")

KINDS: dict[str, dict[str, Any]] = {
    "homogeneous": {"batch_size": 16, "epochs": 3, "dropout": 0.2},
    "heterogeneous, sharded rows": {"batch_size": 16, "epochs": 3, "model": "rgcn", "embedding_lr": 0.02},
    "own script": {"epochs": 2},
}

STEPS = {"homogeneous": 12, "heterogeneous, sharded rows": 12, "own script": 8}  # of an epoch

HOSTS = {"same": BEFORE, "one fewer": BEFORE - 1, "one more": BEFORE + 1}

HELD = {1: ((0, 1, 2, 3),), 2: HALVES, 3: ((0, 1), (2,), (3,))}  # parts of each worker, by number of workers

TOLERANCE = 1e-4  # relative: sums over ranks are taken in another order

OWN = SCRIPT.replace("gf.open(parts)", "gf.open()").replace("if done == die:", "if (done, rank) == (die, victim):")
OWN = OWN.replace("int(sys.argv[3])\n", "int(sys.argv[3])\nvictim = int(sys.argv[4])\n")


@dataclass(frozen=True)
class Kill:
    mode: str
    kind: str
    hosts: str  #: of the resumed run
    last: int  #: steps done by the killed rank
    every: int  #: steps between two checkpoints
    victim: int  #: rank

    @property
    def place(self) -> tuple[int, int]:
        """Return the epoch and the step after which the rank is killed, numbered as in the metrics."""
        return (self.last - 1) // STEPS[self.kind] + 1, (self.last - 1) % STEPS[self.kind]


def drawn() -> list[Kill]:
    """Return a run for each combination of mode, kind and hosts."""
    chance = random.Random(SEED)
    kills = []
    for mode, kind, hosts in itertools.product(MODES, KINDS, HOSTS):
        steps, epochs = STEPS[kind], int(KINDS[kind]["epochs"])
        lasts = [last for last in range(2, steps * epochs) if last % steps or kind == "own script"]
        last = chance.choice(lasts)
        # The hook below is not called after the last step of an epoch, and a script saves after each step.
        every_steps = 1 if kind == "own script" else chance.randint(1, max(1, min(5, last - 1)))
        kills.append(Kill(mode, kind, hosts, last, every_steps, chance.randrange(BEFORE)))
    return kills


class Stage:
    def __init__(self, folder: Path, stack: ExitStack, dataset: str) -> None:
        self.folder, self.parts = folder, write_parts(folder / "parts", 4, dataset)
        self.servers = {count: stack.enter_context(serving_parts(self.parts, held)) for count, held in HELD.items()}

    def cluster(self, mode: str, hosts: int) -> Path:
        servers = self.servers[hosts if mode == "worker" else 2]
        nodes: list[dict[str, Any]] = [
            {"node_rank": place.node_rank, "host": place.host, "role": "server", "endpoint": place.endpoint,
             "parts": list(place.parts), "ranks": []}
            for place in servers.places.values()
        ]  # fmt: skip
        if mode == "worker":
            nodes = [{**node, "role": "worker", "ranks": [node["node_rank"]]} for node in nodes]
        else:
            absent = {"role": "client", "endpoint": None, "parts": []}
            nodes += [{"node_rank": 2 + rank, "host": f"c{rank}", "ranks": [rank], **absent} for rank in range(hosts)]
        path = self.folder / f"{mode}-{hosts}.json"
        path.write_text(json.dumps({"run_id": "r", "num_parts": 4, "nodes": nodes}))
        return path

    def places(self, mode: str, hosts: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return for each rank its node rank and the parts on its host. A client's host has no parts."""
        if mode == "worker":
            return [(node, tuple(parts)) for node, parts in enumerate(HELD[hosts])]
        return [(2 + rank, ()) for rank in range(hosts)]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stage]]:
    with ExitStack() as stack:
        homogeneous = Stage(tmp_path_factory.mktemp("homogeneous"), stack, "synthetic")
        heterogeneous = Stage(tmp_path_factory.mktemp("heterogeneous"), stack, "synthetic-hetero")
        yield {
            "homogeneous": homogeneous,
            "own script": homogeneous,
            "heterogeneous, sharded rows": heterogeneous,
        }


def run(stage: Stage, kill: Kill, hosts: int, folder: Path, resume: Path | None = None, mode: str = "") -> list[Ended]:
    """Train on ``hosts`` hosts, with one rank each.

    If a checkpoint ``resume`` is given, start from it. Otherwise kill rank ``kill.victim`` after ``kill.last`` steps;
    0: kill no rank. ``mode`` replaces ``kill.mode``.
    """
    mode, port = mode or kill.mode, free_port()
    cluster, die = stage.cluster(mode, hosts), resume is None and kill.last > 0
    newest, ranks = folder / "checkpoints" / "last.pt", []
    folder.mkdir()
    script = folder / "own.py"
    script.write_text(OWN)  # before a rank starts: one that reads it while it is written runs an empty script
    for rank, (node, parts) in enumerate(stage.places(mode, hosts)):
        env = {"NODE_RANK": str(node), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if kill.kind == "own script":
            env |= {"GNNFLEET_CLUSTER": str(cluster), "GNNFLEET_RUN_DIR": str(folder)}
            env |= {"GNNFLEET_PART_IDS": ",".join(map(str, parts)), "GNNFLEET_PARTS": str(stage.parts)}
            env |= {"GNNFLEET_RESUME": str(resume)} if resume else {}
            words = [str(script), "-", str(folder / "losses"), str(kill.last if die else 0), str(kill.victim)]
            ranks.append(start_script(words, rank, hosts, port, folder, **env))
            continue
        more = {"resume": str(resume)} if resume else {}
        plain = job(stage.parts, folder, **KINDS[kill.kind], timeout=60.0, **more)
        item = replace(plain, parts=None if mode != "worker" else stage.parts, part_ids=parts, cluster=cluster)
        words = command_line(item)
        if item.parts is None:
            at = words.index("--parts")
            del words[at : at + 2]
        env = rank_environment(rank, hosts, port, **env, GNNFLEET_PART_IDS=",".join(map(str, parts)))
        last = kill.last if die and rank == kill.victim else 0
        ranks.append(Forked(train_until, (words, kill.every, last, newest, STEPS["homogeneous"]), env))
    return finish_all(ranks, 300)


def losses(kind: str, folder: Path) -> dict[tuple[int, int], float]:
    """Return the loss of each step over all ranks, by (epoch, step)."""
    # a resumed run of the bundled trainer has the first losses of its epoch from the checkpoint
    if kind == "own script":
        lines = map(json.loads, (folder / "losses").read_text().splitlines())
        return {(epoch, step): loss for epoch, step, loss in lines}
    found = curve(folder)
    first = int(KINDS[kind]["epochs"]) - len(found) // STEPS[kind]
    return {(first + at // STEPS[kind] + 1, at % STEPS[kind]): loss for at, loss in enumerate(found)}


def position(kind: str, newest: Path) -> tuple[int, int]:
    """Return (finished epochs, finished steps of the next epoch) of a checkpoint."""
    if kind == "own script":
        epoch, step = load_content(newest)["position"]
        return int(epoch), int(step)
    return load_checkpoint(newest).position


HEAD = "| # | mode | kind | killed: rank, epoch, step | hosts | from epoch, step | steps | largest difference |"


def test_losses_after_kills(stages: dict[str, Stage], tmp_path: Path) -> None:
    whole: dict[str, dict[tuple[int, int], float]] = {}
    for kind in KINDS:
        nobody = Kill("worker", kind, "same", 0, 10**6, 0)
        for ended in run(stages[kind], nobody, 1, tmp_path / f"whole-{kind[:3]}"):
            assert ended.returncode == 0, ended.output
        whole[kind] = losses(kind, tmp_path / f"whole-{kind[:3]}")
        assert len(whole[kind]) == STEPS[kind] * int(KINDS[kind]["epochs"])
    rows, wrong = [HEAD, "|" + "---|" * 8], []
    for number, kill in enumerate(drawn(), 1):
        stage, before, after = stages[kill.kind], tmp_path / f"killed{number}", tmp_path / f"resumed{number}"
        ends = run(stage, kill, BEFORE, before)
        assert ends[kill.victim].returncode == -signal.SIGKILL, ends[kill.victim].output
        assert all(ended.returncode != 0 for ended in ends), "the other rank notices"
        newest = before / "checkpoints" / "last.pt"
        at = position(kill.kind, newest)
        for ended in run(stage, kill, HOSTS[kill.hosts], after, newest):
            assert ended.returncode == 0, ended.output
        found = losses(kill.kind, after)
        left = {place: loss for place, loss in whole[kill.kind].items() if place >= (at[0] + 1, at[1])}
        difference = max(abs(found.get(place, 9e9) - loss) / loss for place, loss in left.items())
        killed = f"{kill.victim}, {kill.place[0]}, {kill.place[1]}"
        head = f"| {number} | {kill.mode} | {kill.kind} | {killed} | {kill.hosts} | {at[0] + 1}, {at[1]} "
        rows.append(f"{head}| {len(left)} | {difference:.1e} |")
        print(rows[-1], flush=True)
        if difference > TOLERANCE or not (1, 0) < (at[0] + 1, at[1]) <= (kill.place[0], kill.place[1] + 1):
            wrong.append(rows[-1])
        if os.environ.get("GNNFLEET_KILLS_TABLE"):
            Path(os.environ["GNNFLEET_KILLS_TABLE"]).write_text("\n".join(rows) + "\n")
    assert wrong == [], "\n".join([HEAD, *wrong])
