"""Tests of graph server processes (``trainer serve``): cluster.json, checks between servers, keys, and how they end."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from forked import Forked
from partitions import random_graph, store_of, write_store
from service_kit import (
    INFO,
    client_of,
    free_endpoint,
    new_keys,
    rows_of,
    serve_process,
    server_environment,
    serving,
    wait_for,
    write_cluster,
    write_key_file,
)
from trainer.core import rounding
from trainer.core.errors import ServiceError, SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler import neighbor_kernels, relabel, weighted_temporal
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.neighbor_kernels import take_rows
from trainer.sampler.subgraph_sampler import SubgraphSampler
from trainer.sampler.types import HopRequest, RowRequest, SampleSettings, SeedSet, TimeBound
from trainer.sampler.weighted_temporal import pick_candidates
from trainer.service.cluster import connect_cluster, read_cluster
from trainer.service.service_keys import read_key_file
from trainer.service.warm_up import warm_up, warm_up_batches
from trainer.store.manifest import manifest_digest
from trainer.store.part_store import open_parts
from waiting import stretched


@pytest.fixture
def parts(tmp_path):
    edge_index, num_nodes = random_graph(3, 200, 2000)
    x = np.random.default_rng(0).normal(size=(num_nodes, 4)).astype(np.float32)
    write_store(tmp_path / "parts", store_of(edge_index, num_nodes, 4, attrs={"x": x}))
    return tmp_path / "parts"


def test_two_hosts_encrypted_from_ready_file_to_sigterm(tmp_path, parts) -> None:
    endpoint = free_endpoint()
    cluster = write_cluster(tmp_path / "cluster.json", (0, None, [0, 2]), (1, endpoint, [1, 3]))
    write_key_file(tmp_path / "service.key", new_keys())
    keys, whole = read_key_file(tmp_path / "service.key"), LocalGraph(open_parts(parts))
    with serve_process(tmp_path, parts, [3, 1], endpoint, cluster, tmp_path / "service.key") as (process, ready):
        clients = connect_cluster(cluster, 0, manifest_digest(parts), 60, keys)
        assert list(clients) == [1] and clients[1].part_ids == (1, 3)
        assert wait_for(ready, process) == {"endpoint": endpoint, "pid": process.pid}
        routed = DistGraph(LocalGraph(open_parts(parts, [0, 2])), clients)
        nodes = np.random.default_rng(1).integers(0, 200, 100)
        request = HopRequest(HOMO_EDGE, nodes, 5, 5, key=11)
        np.testing.assert_array_equal(routed.sample_hops([request])[0].src, whole.sample_hops([request])[0].src)
        np.testing.assert_array_equal(rows_of(routed, nodes)["x"], rows_of(whole, nodes)["x"])
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and time.monotonic() - start < stretched(25)
        assert f"serving parts 1,3 at {endpoint}" in output and "Traceback" not in output
        clients[1].close()


def test_in_a_slurm_job_the_server_answers_after_sigterm_until_sigint(tmp_path, parts, monkeypatch) -> None:
    monkeypatch.setenv("GNNFLEET_SAVE_ON_TERM", "60")
    endpoint = free_endpoint()
    cluster = write_cluster(tmp_path / "cluster.json", (0, endpoint, [0, 1, 2, 3]))
    with serve_process(tmp_path, parts, [0, 1, 2, 3], endpoint, cluster) as (process, ready):
        wait_for(ready, process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with client_of(endpoint) as client:
            assert client.greet().result().part_ids == (0, 1, 2, 3)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and "stopping after" in output


def test_busy_port_ends_with_one_line_and_status_1(tmp_path, parts) -> None:
    with serving() as other:
        cluster = write_cluster(tmp_path / "cluster.json", (0, other.endpoint, [0, 1, 2, 3]))
        with serve_process(tmp_path, parts, [0, 1, 2, 3], other.endpoint, cluster) as (process, ready):
            output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and not ready.exists()
    assert output.strip().splitlines() == [
        f"error: graph server: {other.endpoint} is in use by another process; end it or choose another port"
    ]


def test_parts_that_differ_from_cluster_json_are_refused(tmp_path, parts) -> None:
    cluster = write_cluster(tmp_path / "cluster.json", (0, None, [0, 1]), (1, None, [2, 3]))
    with serve_process(tmp_path, parts, [0, 3], "tcp://127.0.0.1:0", cluster) as (process, _):
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "node 0 has parts [0, 1], not [0, 3]" in output


def test_a_ready_file_that_cannot_be_written_is_an_error(tmp_path, parts) -> None:
    cluster = write_cluster(tmp_path / "cluster.json", (0, None, [0, 1, 2, 3]))
    with serve_process(tmp_path / "none", parts, [0, 1, 2, 3], "tcp://127.0.0.1:0", cluster) as (process, ready):
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.strip() == f"error: ready file {ready} cannot be written: No such file or directory"


def test_a_peer_may_start_late(tmp_path) -> None:
    endpoint = free_endpoint()
    cluster = write_cluster(tmp_path / "cluster.json", (0, None, [0, 2]), (1, endpoint, [1, 3]))
    found: list[dict] = []
    connecting = threading.Thread(
        target=lambda: found.append(connect_cluster(cluster, 0, INFO.manifest_digest, 1, start_deadline=60))
    )
    connecting.start()
    time.sleep(1.2)
    with serving(endpoint=endpoint):
        connecting.join(60)
    assert list(found[0]) == [1] and found[0][1].deadline == 1
    found[0][1].close()


def test_all_unfit_peers_are_named_in_one_message(tmp_path) -> None:
    absent = free_endpoint()
    with serving() as one, serving() as two:
        nodes = [(0, None, [0]), (1, one.endpoint, [1, 3]), (2, two.endpoint, [2]), (4, absent, [4])]
        cluster = write_cluster(tmp_path / "cluster.json", *nodes)
        start = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            connect_cluster(cluster, 0, "a7" * 32, 1)
        assert time.monotonic() - start < stretched(20)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("manifest.json of node1 (host1) differs: d1d1d1d1d1d1 there, a7a7a7a7a7a7 here")
    assert "answers node1 (10.0.0.2) with parts [1, 3]; cluster.json says node2 with parts [2]" in lines[1]
    gone = rf"node4 \(host4\) at {absent}, parts 4: no answer within [\d.]+ s to hello \(no connection\)"
    assert re.search(gone, lines[2]) and caught.value.wait.node_rank == 4


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not a cluster.json"),
        ("[]", "is not a cluster.json"),
        ('{"run_id": "r", "num_parts": 1}', "is not a cluster.json"),
        ('{"run_id": "r", "num_parts": 2, "nodes": []}', r"no node has parts \[0, 1\] of 2"),
    ],
)
def test_bad_cluster_files(tmp_path, text: str | None, cause: str) -> None:
    if text is not None:
        (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(SettingsError, match=f"cluster.json.*{cause}"):
        read_cluster(tmp_path / "cluster.json")


def test_key_file_is_private_and_survives(tmp_path) -> None:
    keys, path = new_keys(), tmp_path / "service.key"
    write_key_file(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == keys
    assert keys.secret not in repr(keys)
    assert set(json.loads(path.read_text())) == {"public", "secret"}


def test_bad_key_files(tmp_path) -> None:
    path, keys = tmp_path / "service.key", new_keys()
    with pytest.raises(ServiceError, match="service.key cannot be read: .*No such file"):
        read_key_file(path)
    write_key_file(path, keys)
    path.chmod(0o640)
    with pytest.raises(ServiceError, match=f"mode 0640.*chmod 600 {path}"):
        read_key_file(path)
    path.chmod(0o600)
    stranger = new_keys()
    for text, cause in [
        ("", "no key file"),
        ('{"public": "short", "secret": "short"}', "no key file"),
        ('{"public": 1}', "no key file"),
        (json.dumps({"public": stranger.public, "secret": keys.secret}), "do not belong together"),
    ]:
        path.write_text(text)
        with pytest.raises(ServiceError, match=cause) as caught:
            read_key_file(path)
        assert keys.secret not in str(caught.value)


@pytest.mark.slow
def test_no_request_waits_for_the_compiler(tmp_path) -> None:
    edge_index, num_nodes = random_graph(3, 200, 2000)
    rng = np.random.default_rng(0)
    edge_attrs = {
        "weight": rng.random(2000), "age": rng.integers(0, 9, 2000).astype(np.int16), "score": -rng.random(2000),
        "half": rng.random(2000).astype(np.float16), "word": rng.integers(0, 9, (2000, 3)).astype(np.uint8),
    }  # fmt: skip
    write_store(tmp_path, store_of(edge_index, num_nodes, 2, edge_attrs=edge_attrs))
    graph, nodes = LocalGraph(open_parts(tmp_path)), np.arange(50)
    warm_up(graph)
    kernels = pick_candidates, take_rows
    compiled = [len(kernel.signatures) for kernel in kernels]
    plain = HopRequest(HOMO_EDGE, nodes, 2, 0, key=1)
    graph.sample_hops([replace(plain, weight=name) for name in ("weight", "age", "half")])
    graph.sample_hops([replace(plain, bound=TimeBound(nodes, "age", "edge", last)) for last in (False, True)])
    graph.sample_hops([replace(plain, sources=nodes), replace(plain, replace=True)])
    graph.gather([RowRequest(HOMO_EDGE, nodes, tuple(edge_attrs))])
    assert [len(kernel.signatures) for kernel in kernels] == compiled


def test_no_batch_waits_for_the_compiler(tmp_path) -> None:
    # Runs in its own process, which forgets all kernels first.
    rng = np.random.default_rng(0)
    edge_index, num_nodes = random_graph(3, 4000, 20_000)
    attrs = {"x": rng.random((4000, 3)), "y": rng.integers(0, 5, 4000), "half": rng.random(4000).astype(np.float16)}
    write_store(tmp_path, store_of(edge_index, num_nodes, 2, attrs=attrs))
    process = Forked(sample_after_warming_up, (tmp_path,), server_environment())
    assert process.wait() == 0, process.output


def sample_after_warming_up(parts: Path) -> None:
    modules = (weighted_temporal, neighbor_kernels, relabel, rounding)
    kernels = [each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)]
    for kernel in kernels:
        kernel._reset_overloads()  # those that the server has loaded, which forked this process

    def compiled() -> dict[str, int]:
        return {kernel.__name__: len(kernel.signatures) for kernel in kernels}

    graph, other = (LocalGraph(open_parts(parts, [part])) for part in (0, 1))
    assert not any(compiled().values()), "warming up compiled no kernel, so this test proves nothing"
    warm_up(graph)
    warm_up_batches(graph)
    before = compiled()
    plain = SampleSettings({HOMO_EDGE: (15, 10)}, edge_ids=True)
    attrs = {HOMO_NODE: ("x", "y", "half")}
    with serving(other) as server, client_of(server.endpoint) as client:
        client.place = replace(client.place, parts=(1,))
        for settings in (plain, replace(plain, disjoint=True), replace(plain, induced=True)):
            sampler = SubgraphSampler(DistGraph(graph, {1: client}), graph.store.manifest, settings, attrs)
            for size in (10, 1500):
                sampler.sample(SeedSet({HOMO_NODE: np.arange(1000, 1000 + size * 2, 2)}), 7)
        for form in ("float16", "int8"):
            with client_of(server.endpoint, wire_rows=form) as rounding_client:
                rounding_client.gather([RowRequest(HOMO_NODE, np.arange(2000, 3000), ("x",))])
    assert compiled() == before, (before, compiled())
