"""Tests of a serving cluster on real hosts: attached and killed runs, lost servers, a notebook."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import trainer
from launcher.plan.service_key import new_key_pair
from launching import SYNTHETIC, Running
from netns import NetCluster
from operator_kit import end_processes, run_processes
from serving_hosts import CLIENTS, NAME, SERVERS, ServingHosts
from terminal import Terminal
from trainer.core.errors import ServiceError
from trainer.loader.block_loader import BatchLoader
from trainer.service.service_keys import read_key_file
from trainer.train.checkpoint import load_checkpoint
from trainer.train.loaders import loader_settings
from trainer.train.model import trained_model
from trainer.train.settings import TrainSettings
from waiting import stretched, wait_until

LONG = 5000  # epochs

#: Listens on port $1 from a process of its own, whose pid is printed.
LISTEN = """
import os, socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
if pid := os.fork():
    print(pid, flush=True)
    os._exit(0)
os.closerange(0, 3)
time.sleep(600)
"""

#: Slow; tests/launcher/test_serving_local.py tests a serving cluster on one machine.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    with NetCluster(4) as made:
        yield made
        end_processes(made)


@pytest.fixture(scope="module")
def toy(cluster: NetCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingHosts]:
    hosts = ServingHosts(cluster, tmp_path_factory.mktemp("home"))
    done = hosts.serve()
    assert done.status == 0, done.output
    assert f"serving cluster {NAME} is up: 2 servers, 4 parts" in done.output
    yield hosts
    done = hosts.gnnfleet("serve", "stop", NAME)
    assert done.status == 0 and f"run {NAME}: no process of it is left on its" in done.output, done.output
    assert run_processes(cluster) == []


@pytest.fixture(scope="module")
def curve(toy: ServingHosts) -> list[float]:
    done = toy.start("alone", CLIENTS, epochs=6).end()
    assert done.status == 0, done.output
    assert f"attached to serving cluster {NAME}: 2 servers, 4 parts" in done.output
    return toy.curve("alone")


def test_a_run_attaches_by_name_and_leaves_no_key(toy: ServingHosts, curve: list[float]) -> None:
    assert sum(curve[-8:]) < 0.6 * sum(curve[:8])  # first and last epoch
    assert toy.guests(0) == toy.guests(1) == []
    batches = len(curve) * len(CLIENTS)
    wait_until(lambda: toy.served_batches().get("alone", 0) >= batches)  # servers write their figures now and then


def test_killing_one_of_two_runs_does_not_disturb_the_other(
    cluster: NetCluster, toy: ServingHosts, curve: list[float], tmp_path: Path
) -> None:
    # The second run is launched by a user who has no record of the serving cluster; gnnfleet finds the cluster by
    # asking the hosts of the config file.
    serves = [toy.supervisor(k) for k in SERVERS]
    elsewhere = ServingHosts(cluster, tmp_path / "elsewhere")
    victim = toy.start("victim", (CLIENTS[0],), LONG).await_epoch(2, cluster.path_on)
    other = elsewhere.start("other", (CLIENTS[1],), 6, SERVERS)
    wait_until(lambda: toy.guests(0) == toy.guests(1) == ["other", "victim"])  # until the other one has ended
    toy.kill_run(victim, (CLIENTS[0],))
    done = other.end()
    assert done.status == 0, done.output
    wait_until(lambda: {"victim", "other"} <= toy.served_batches().keys())
    assert elsewhere.curve("other") == pytest.approx(curve, rel=1e-4)
    assert [toy.supervisor(k) for k in SERVERS] == serves
    toy.gnnfleet("stop", "victim")
    assert toy.guests(0) == toy.guests(1) == []
    assert {node["state"] for node in toy.status()["nodes"]} == {"serving"}


@pytest.mark.timeout(900)
def test_a_run_continues_after_losing_each_server_in_turn(
    cluster: NetCluster, toy: ServingHosts, curve: list[float]
) -> None:
    # The port of the first server is taken while it is down: the second server and the clients learn its new address.
    first, second = (cluster.hosts[k] for k in SERVERS)
    before = toy.endpoints()
    run = toy.start("endures", CLIENTS, LONG).await_epoch(3, cluster.path_on)
    first.power_cut()
    goes_on(run, cluster)
    status = toy.status()
    assert "1 of 2 servers down; all parts are served" in status["sentence"] and status["exit_status"] == 1
    first.power_on()
    first.wait_until_up()
    other = first.run([sys.executable, "-c", LISTEN, before[0].rpartition(":")[2]]).stdout
    done = toy.serve()
    first.run(["kill", other.strip()])
    assert done.status == 0 and "starting 1 graph server" in done.output, done.output
    assert toy.endpoints()[0] != before[0] and toy.endpoints()[1] == before[1]
    assert toy.guests(0) == ["endures"], "the run's key is still accepted"
    goes_on(run, cluster, seconds=15)  # clients look for new addresses every ten seconds
    second.power_cut()
    goes_on(run, cluster)
    second.power_on()
    second.wait_until_up()
    assert toy.serve().status == 0
    assert {node["state"] for node in toy.status()["nodes"]} == {"serving"}
    done = run.send(signal.SIGTERM).end()
    assert done.status == 130, done.output
    losses = toy.curve("endures")
    assert losses[: len(curve)] == pytest.approx(curve, rel=1e-4)
    assert toy.guests(0) == toy.guests(1) == []


def goes_on(run: Running, cluster: NetCluster, seconds: float = 0.0) -> None:
    """Wait until the run has finished two more epochs, and for at least ``seconds``."""
    at, start = run.epoch(cluster.path_on), time.monotonic()
    wait_until(lambda: run.epoch(cluster.path_on) > at + 2 and time.monotonic() > start + seconds)


def test_the_status_in_a_terminal(toy: ServingHosts, curve: list[float]) -> None:
    with Terminal("serve", "status", NAME, cwd=toy.folder, env=toy.operator.env, columns=120) as terminal:
        status, lines = terminal.end(), terminal.shown.splitlines()
    assert status == 0
    assert lines[0].startswith(f"serving cluster {NAME} is up: ")
    assert lines[1].split()[:6] == ["server", "state", "parts", "busy", "clients", "queue"]
    for k in SERVERS:
        (line,) = (line for line in lines if line.startswith(f"node{k} (root@{toy.cluster.hosts[k].address})"))
        assert line.split()[2:4] == ["serving", "0–3"]
    assert max(map(len, lines)) <= 120


def test_a_notebook_reads_the_graph_and_scores_the_model(toy: ServingHosts, curve: list[float], tmp_path: Path) -> None:
    # A Python process on a machine outside of the serving cluster reads the graph and evaluates a model; it needs only
    # a key file and the checkpoint.
    done = toy.gnnfleet("serve", "key", NAME, "-o", "ann.key", "--for", "ann")
    assert done.status == 0, done.output
    saved = load_checkpoint(toy.folder / "runs/alone/checkpoints/last.pt")
    with trainer.connect(key=toy.folder / "ann.key", deadline=30, name="ann") as graph:
        batch = trainer.DistNeighborLoader(graph, [3, 3], range(40), batch_size=40)(range(40))
        assert batch.input_id.tolist() == list(range(40)) and batch.x.shape[1] == SYNTHETIC["num_features"]
        model, _ = trained_model(saved)
        settings = loader_settings(TrainSettings(**saved.settings), saved.graph["target"], "test", False)
        with torch.no_grad():
            right = [
                model(batch).argmax(1) == batch.y for batch in BatchLoader(graph, settings, 0, graph.layout).epoch(0)
            ]
    recorded = json.loads((toy.folder / "runs/alone/result.json").read_text())["metrics"]["test_accuracy"]
    assert float(torch.cat(right).float().mean()) == pytest.approx(recorded, abs=1e-6)


def test_a_wrong_key_is_refused_with_one_message(toy: ServingHosts, tmp_path: Path) -> None:
    done = toy.gnnfleet("serve", "key", NAME, "-o", str(tmp_path / "bob.key"))
    assert done.status == 0, done.output
    keys = read_key_file(tmp_path / "bob.key")
    wrong = {**new_key_pair(), "server": keys.server, "endpoints": keys.endpoints}
    (tmp_path / "wrong.key").touch(mode=0o600)
    (tmp_path / "wrong.key").write_text(json.dumps(wrong))
    start = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        trainer.connect(key=tmp_path / "wrong.key", deadline=30)
    assert time.monotonic() - start < stretched(10)
    message = str(caught.value)
    assert message.count("admits this key (gnnfleet serve key)") == 1 and "\n" not in message
