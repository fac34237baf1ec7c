"""Tests of ``data.store`` on SSH hosts with an S3 server: training, cut connections, a killed launcher, a wrong byte.

The server is moto, which implements S3's API. The hosts send requests by s3fs and aiobotocore over their network.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from launcher.node.store.fetch import CHUNK
from launching import SYNTHETIC, Launched, Running, launch, write_config
from netns import DISK, Host, NetCluster
from s3_kit import KEYS, S3Server, s3_server
from ssh_nodes import ssh_nodes
from waiting import DEADLINE

MISSING = [name for name in ("moto", "s3fs") if find_spec(name) is None]  # importing them takes half a second
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' '.join(MISSING)}")]

LARGE = SYNTHETIC | {"num_nodes": 3000, "num_features": 2700}  # ten MB of rows per host
X = "nodes/node/attrs/x.npy"
NOTHING = "import os; print('rank', os.environ['RANK'])\n"


@pytest.fixture()
def s3(cluster: NetCluster) -> Iterator[S3Server]:
    with s3_server(f"{cluster.prefix}.1") as server:
        yield server


def config_in(folder: Path, cluster: NetCluster, s3: S3Server, **data: object) -> Path:
    folder.mkdir(exist_ok=True)
    nodes = [{**node, "env": {**node["env"], **KEYS}} for node in ssh_nodes(cluster)]
    store = {"store": "s3://bucket/toy", "store_options": {"endpoint_url": s3.endpoint}, "topology": "partitioned"}
    (folder / "nothing.py").write_text(NOTHING)
    return write_config(folder, nodes, data={**store, **data})


def run(config: Path, cluster: NetCluster, *words: str) -> Launched:
    return launch(config, *words, env=cluster.environment(**KEYS))


def fetched_folder(host: Host) -> Path:
    """Return the partition folder that a host fetched last."""
    found = host.root_path(f"{DISK}/data").glob("*/.gnnfleet-store.json")
    return max(found, key=lambda note: note.stat().st_mtime).parent


def test_hosts_fetch_only_their_parts_and_train_as_ever(
    cluster: NetCluster, s3: S3Server, tmp_path: Path, local_runs: dict[str, Launched]
) -> None:
    for host in cluster.hosts:  # another file's test may have left the same parts
        host.run(["rm", "-rf", f"{DISK}/data"])
    done = run(config_in(tmp_path / "one", cluster, s3), cluster)
    assert done.status == 0, done.output
    assert done.step_losses() == pytest.approx(local_runs["one"].step_losses(), rel=1e-4)
    for k, host in enumerate(cluster.hosts):
        paths = [request.path for request in s3.of(host.address) if request.path != "bucket"]  # preflight may list it
        tops = {path.split("/")[2] for path in paths}
        assert tops == {"manifest.json", "shared", f"part{k}"}
    assert "parts uploaded to s3://bucket/toy" in done.output
    s3.requests.clear()
    again = run(config_in(tmp_path / "two", cluster, s3), cluster, "--epochs", "1")
    assert again.status == 0, again.output
    assert "parts are in s3://bucket/toy" in again.output and not (tmp_path / "two/parts").exists()
    assert not any(request.path.endswith(".npy") or request.method == "PUT" for request in s3.requests)


def test_cut_connections_do_not_end_a_launch(cluster: NetCluster, s3: S3Server, tmp_path: Path) -> None:
    config = config_in(tmp_path, cluster, s3, options=LARGE)
    s3.cuts = 20
    done = run(config, cluster, "--", "python", "nothing.py")
    assert done.status == 0, done.output
    assert s3.cuts == 0, "all cuts were made"
    for k, host in enumerate(cluster.hosts):
        folder = fetched_folder(host)
        assert (folder / f"part{k}" / X).read_bytes() == (tmp_path / "parts" / f"part{k}" / X).read_bytes()
        assert not list(folder.rglob("*.part"))


def test_after_the_launcher_died_the_next_launch_continues_at_the_same_byte(
    cluster: NetCluster, s3: S3Server, tmp_path: Path
) -> None:
    host = cluster.hosts[1]
    config, running, begun = launched_until_chunk(tmp_path, cluster, s3, host, num_classes=4)
    running.send(signal.SIGKILL).process.wait(DEADLINE)
    deadline = time.monotonic() + DEADLINE
    while any("fetch_parts" in each.cmdline for each in host.processes()):
        assert time.monotonic() < deadline, "the fetch goes on without a launcher"
        time.sleep(0.1)
    size = begun.stat().st_size
    assert size == CHUNK < (tmp_path / f"parts/part1/{X}").stat().st_size
    s3.held = False
    s3.requests.clear()
    done = run(config, cluster, "--", "python", "nothing.py")
    assert done.status == 0, done.output
    starts = [request.start for request in s3.of(host.address) if request.path.endswith(f"part1/{X}")]
    assert min(starts) == size
    assert (begun.parent / "x.npy").read_bytes() == (tmp_path / f"parts/part1/{X}").read_bytes()


def test_a_host_without_network_for_a_while_continues_its_fetch(
    cluster: NetCluster, s3: S3Server, tmp_path: Path
) -> None:
    host = cluster.hosts[1]
    _, running, begun = launched_until_chunk(tmp_path, cluster, s3, host, num_classes=3)
    host.cut_network()
    try:
        running.await_line("connection lost while sending")
    finally:
        host.restore_network()
    s3.held = False
    done = running.end(240)
    assert done.status == 0, done.output
    assert (begun.parent / "x.npy").read_bytes() == (tmp_path / f"parts/part1/{X}").read_bytes()


def launched_until_chunk(
    folder: Path, cluster: NetCluster, s3: S3Server, host: Host, num_classes: int
) -> tuple[Path, Running, Path]:
    """Launch a run whose store sends no more than the first chunk of each file; return when ``host`` has that of x.

    Returns the cluster.yml, the launch, and the unfinished file. ``num_classes``: makes other parts than other tests.
    """
    config = config_in(folder, cluster, s3, options=LARGE | {"num_classes": num_classes})
    s3.held = True
    running = Running(config, "--", "python", "nothing.py", env=cluster.environment(**KEYS))
    unfinished = host.root_path(f"{DISK}/data")

    def begun() -> list[Path]:
        return [part for part in unfinished.glob(f"*/part1/{X}.part") if part.stat().st_size == CHUNK]

    running.await_true(lambda: bool(begun()), f"the first chunk of {X} on {host.name}")
    return config, running, begun()[0]


def test_preflight_refuses_a_host_without_credentials(cluster: NetCluster, s3: S3Server, tmp_path: Path) -> None:
    config = config_in(tmp_path, cluster, s3)
    document = yaml.safe_load(config.read_text())
    del document["nodes"][1]["env"]["AWS_SECRET_ACCESS_KEY"]
    config.write_text(yaml.safe_dump(document))
    done = run(config, cluster)
    assert done.status == 3, done.output
    assert "Credentials" in done.output and "preflight refused the run because of node1" in done.output
    assert s3.of(cluster.hosts[1].address) == [] and not (tmp_path / "parts").exists()


def test_a_wrong_byte_is_refused(cluster: NetCluster, s3: S3Server, tmp_path: Path) -> None:
    config = config_in(tmp_path, cluster, s3, options=SYNTHETIC | {"num_features": 20})
    pushed = run(config, cluster, "--epochs", "1")
    assert pushed.status == 0, pushed.output
    for host in cluster.hosts:
        host.run(["rm", "-r", f"{DISK}/data/{fetched_folder(host).name}"])
    s3.flip_byte(f"toy/part2/{X}")
    done = run(config, cluster)
    assert done.status == 1, done.output
    assert f"node2 ({cluster.hosts[2].address}" in done.output.replace("root@", "")
    assert f"s3://bucket/toy/part2/{X}: digest " in done.output and "Traceback" not in done.output
    folder = fetched_folder(cluster.hosts[2])
    assert not (folder / "part2" / X).exists() and not (folder / "manifest.json").exists()
    assert not list(folder.rglob("*.part"))
