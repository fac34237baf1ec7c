"""Measures loading an epoch from a graph server: gnnfleet and graphlearn-torch on the same graph.

Server and client run on one machine and use TCP over the loopback. By default, graphlearn-torch samples with
replacement, so its batches have fewer nodes.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphs import BATCH, FANOUTS, partitioned
from launcher.plan.service_key import new_key_pair
from peers.envs import GLT, peer_python
from peers.jobs import Done, Job, private_loopback, run_job
from peers.plain import plain_graph
from table import Row, show
from trainer.service.service_keys import ServiceKeys

HERE = Path(__file__).resolve().parent
GLT_JOB = HERE / "peers/glt_job.py"
ON_LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
TURNS = 2  #: number of runs of each configuration, in turn

#: Settings of graphlearn-torch. DOCUMENTED: as in its documentation, except for the buffer: the default of 64 MB is too
#: small for a batch, so the loader would block forever. SEEDED: with a fixed seed, which makes its sampler much faster.
#: TUNED: the fastest settings found.
DOCUMENTED = {"seed": None, "concurrency": 4, "prefetch": 2, "buffer": "1GB"}
SEEDED = DOCUMENTED | {"seed": 1}
TUNED = {"seed": 1, "workers": 2, "concurrency": 2, "prefetch": 4, "buffer": "1GB"}


@dataclass(frozen=True)
class Contender:
    """One system with one choice of settings."""

    name: str
    make: Callable[[int, Path], Job]  #: makes the commands from a free port and an empty folder
    turns: int = TURNS
    found: list[Done] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median seconds of an epoch over all runs."""
        return statistics.median(second for done in self.found for second in done.result["seconds"])

    @property
    def cpu(self) -> float:
        return statistics.median(second for done in self.found for second in done.result["cpu"])

    def most(self, name: str) -> float:
        return max(getattr(done, name) for done in self.found)

    def rate(self, what: str) -> float:
        """Return the loading speed in millions of ``what`` (nodes or edges) per second."""
        return float(self.found[-1].result[what]) / self.seconds / 1e6

    def megabytes(self) -> float:
        return statistics.median(count for done in self.found for count in done.result["bytes"]) / 1e6


def run(small: bool) -> list[Row]:
    ours, theirs = our_contenders(small), glt_contenders(small)
    with private_loopback() as network:
        for turn in range(TURNS):
            for one in (*theirs, *ours):
                if turn < one.turns:
                    one.found.append(one_run(one, network))
    return [row for one in (*ours, *theirs) for row in rows(one, theirs[-1] if one in ours and theirs else None)]


def one_run(contender: Contender, network: Sequence[str]) -> Done:
    with tempfile.TemporaryDirectory() as folder:
        done = run_job(contender.make(free_port(), Path(folder)), network, Path(folder) / "log")
    if not done.result["complete"]:
        print(f"serving: {contender.name}: an epoch missed or repeated seeds; seeds by epoch: {done.result['seeds']}")
    print(f"serving: {contender.name}: {done}", flush=True)
    return done


def rows(contender: Contender, best: Contender | None) -> list[Row]:
    """Return time, memory and bytes sent of a contender, compared with those of ``best`` unless it is None."""
    name = "graphlearn-torch, best" if best else ""

    def row(what: str, unit: str, figure: Callable[[Contender], float]) -> Row:
        return Row(f"{contender.name}: {what}", figure(contender), unit, name, figure(best) if best else None)

    return [
        row("epoch", "s", lambda one: one.seconds),
        Row(
            f"{contender.name}: nodes", contender.rate("nodes"), "million/s", name, best and best.rate("nodes"), "more"
        ),
        Row(
            f"{contender.name}: edges", contender.rate("edges"), "million/s", name, best and best.rate("edges"), "more"
        ),
        row("processor time of an epoch", "s", lambda one: one.cpu),
        row("bytes on the wire", "MB", lambda one: one.megabytes()),
        row("server memory", "MB", lambda one: one.most("server_memory") / 1e6),
        row("client memory", "MB", lambda one: one.most("client_memory") / 1e6),
    ]


# -- gnnfleet ------------------------------------------------------------


def our_contenders(small: bool) -> list[Contender]:
    plain, parts = plain_graph(small), partitioned(small, 2)

    def contender(name: str, keys: ServiceKeys | None = None, **settings: Any) -> Contender:
        return Contender(f"gnnfleet, {name}", lambda port, folder: our_job(plain, parts, keys, settings, port, folder))

    keys = ServiceKeys(**new_key_pair())
    return [
        contender("Data"),
        contender("Data, encrypted", keys),
        contender("Data, with replacement", replace=True),
        contender("blocks", loader="blocks"),
        contender("blocks, with replacement", loader="blocks", replace=True),
    ]


def our_job(plain: Path, parts: Path, keys: ServiceKeys | None, more: dict[str, Any], port: int, folder: Path) -> Job:
    endpoint, ready, key_file = f"tcp://127.0.0.1:{port}", folder / "ready", folder / "service.key"
    node = {"node_rank": 0, "host": "loopback", "role": "server", "endpoint": endpoint, "parts": [0, 1], "ranks": []}
    cluster = folder / "cluster.json"
    cluster.write_text(json.dumps({"run_id": "bench", "num_parts": 2, "version": 1, "nodes": [node]}))
    server = [sys.executable, "-m", "trainer", "serve", "--parts", parts, "--own", "0,1", "--bind", endpoint]
    server += ["--cluster", cluster, "--node-rank", "0", "--ready-file", ready]
    if keys is not None:
        key_file.touch(mode=0o600)
        key_file.write_text(json.dumps({"public": keys.public, "secret": keys.secret}))
        server += ["--key-file", key_file]
    settings = common() | {"prefetch": 4, "replace": False, "loader": "data"} | more
    settings |= {"endpoint": endpoint, "key": keys and str(key_file)}
    client = [sys.executable, HERE / "peers/our_client.py", plain, json.dumps(settings)]
    return Job([server], client, HERE.parent, [ready])


# -- graphlearn-torch ----------------------------------------------------


def glt_contenders(small: bool) -> list[Contender]:
    python = peer_python(GLT)
    if python is None:
        return []
    plain = plain_graph(small)

    def contender(name: str, settings: dict[str, Any], turns: int = TURNS, servers: int = 1) -> Contender:
        return Contender(
            f"graphlearn-torch, {name}",
            lambda port, folder: glt_job(python, plain, glt_parts(python, plain, servers), servers, settings, port),
            turns,
        )

    return [
        contender("as documented", DOCUMENTED | {"epochs": 1}, turns=1),
        contender("as documented, 2 servers", SEEDED, turns=1, servers=2),
        contender("with its seed", SEEDED, turns=1),
        contender("best", TUNED),
    ]


def glt_parts(python: Path, plain: Path, servers: int) -> Path:
    folder = plain.with_name(f"{plain.name}-glt-{servers}")
    if not (folder / "ready").exists():
        subprocess.run([python, GLT_JOB, "cut", plain, folder, str(servers)], check=True, capture_output=True)
    return folder


def glt_job(python: Path, plain: Path, folder: Path, servers: int, settings: dict[str, Any], port: int) -> Job:
    server = [[python, GLT_JOB, "server", plain, folder, str(k), str(servers), str(port)] for k in range(servers)]
    job = common() | {"folder": str(folder), "servers": servers, "port": port} | settings
    return Job(server, [python, GLT_JOB, "client", plain, json.dumps(job)], HERE.parent, env=ON_LOOPBACK)


def common() -> dict[str, Any]:
    return {"fanouts": FANOUTS, "batch": BATCH, "warm": 1, "epochs": 3}


def free_port() -> int:
    # graphlearn-torch also uses the next port, which is not checked
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])


def main() -> None:
    show("serving", run("--small" in sys.argv))


if __name__ == "__main__":
    main()
