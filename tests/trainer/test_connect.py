"""Tests of ``trainer.connect``, which opens a graph in a notebook: batches, and errors of servers and keys."""

from __future__ import annotations

import http.server
import re
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

import trainer
from gateway_kit import serving_parts, written
from load_kit import hetero_data, homo_data
from oracle import assert_identical
from service_kit import admit_guest, free_endpoint, new_keys, write_key_file
from trainer import DistLinkNeighborLoader, DistNeighborLoader
from trainer.core.errors import ServiceError, SettingsError
from trainer.graph import connect
from trainer.graph.open import open_graph
from waiting import stretched


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    monkeypatch.setattr(connect, "GONE_AFTER", 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("parts"), homo_data())


@pytest.fixture(scope="module")
def plain(folder):
    with serving_parts(folder) as servers:
        yield servers


@pytest.fixture(scope="module")
def secured(folder, tmp_path_factory):
    home = tmp_path_factory.mktemp("keys")
    own = replace(new_keys(), guests=home / "clients")
    write_key_file(home / "service.key", own)
    guest = replace(new_keys(), server=own.public)
    admit_guest(home / "service.key", "alice", guest.public)
    with serving_parts(folder, keys=own) as servers:
        endpoints = tuple(place.endpoint for place in servers.places.values())
        write_key_file(home / "alice.key", replace(guest, endpoints=endpoints, name="products"))
        yield servers, home / "alice.key"


def refusal(*given, **options):
    """Return the message of a failing ``connect``, and the seconds until it failed."""
    start = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        trainer.connect(*given, **options)
    assert not [thread for thread in threading.enumerate() if thread.name == "server-probe"]
    return str(caught.value), time.monotonic() - start


def test_loaders_on_a_connected_graph(folder, plain):
    with open_graph(folder) as local, trainer.connect(plain.places[1].endpoint, name="alice") as graph:
        assert graph.num_classes == local.num_classes and graph.layout == local.layout
        for make in (
            lambda g: DistNeighborLoader(g, [4, 3], "train", batch_size=8, shuffle=True),
            lambda g: DistLinkNeighborLoader(g, [4], batch_size=50, neg_sampling="binary"),
            lambda g: DistNeighborLoader(g, [], "train", batch_size=8),
        ):
            assert_identical(list(make(graph)), list(make(local)))
        (client,) = [client for client in plain.servers[1]._scheduler.status().clients if "alice" in client.name]
        assert client.name.startswith("alice on ")


def test_one_endpoint_is_enough_to_find_the_others(plain):
    with trainer.connect(plain.places[1].endpoint) as graph:
        assert [place.name for place in graph.gateway.servers] == ["node1 (s1)", "node0 (s0)"]
        assert graph.gateway.home.parts == (2, 3)
        assert repr(graph).startswith("Graph(") and repr(graph).endswith(" 4 parts; served by node1 (s1))")


def test_a_key_file_contains_identity_and_endpoints(secured, folder):
    servers, key = secured
    with trainer.connect(key=key) as graph, open_graph(folder) as local:
        assert_identical(
            DistNeighborLoader(graph, [4], "train")(range(5)), DistNeighborLoader(local, [4], "train")(range(5))
        )
    with trainer.connect(servers.places[0].endpoint, str(key)) as graph:
        assert graph.num_nodes == 60


def test_an_endpoint_that_does_not_answer_is_skipped(plain):
    with trainer.connect([free_endpoint(), plain.places[0].endpoint], deadline=5) as graph:
        assert graph.gateway.home.name == "node0 (s0)"


def test_an_unreachable_server_is_reported_at_once():
    absent = free_endpoint()
    message, seconds = refusal(absent, deadline=30)
    assert message.startswith(f"graph server at {absent}: no answer") and "no connection" in message
    assert seconds < stretched(20)


@pytest.mark.parametrize("who", ["a stranger's key", "no key"])
def test_a_key_that_is_not_admitted_is_reported(secured, tmp_path, who):
    servers, _ = secured
    key = None
    if who == "a stranger's key":
        key = tmp_path / "stranger.key"
        write_key_file(key, replace(new_keys(), server=servers.keys.public))
    message, seconds = refusal(servers.places[0].endpoint, key, deadline=30)
    assert re.match(r"graph server at tcp://\S+: no answer .*key", message), message
    assert seconds < stretched(20)


def test_an_error_at_all_endpoints_is_reported_once(secured, tmp_path):
    servers, _ = secured
    first, second = (place.endpoint for place in servers.places.values())
    key = tmp_path / "stranger.key"
    write_key_file(key, replace(new_keys(), server=servers.keys.public, endpoints=(first, second)))
    message, _ = refusal(key=key, deadline=30)
    assert message.startswith(f"graph server at {first}: no answer within")
    assert message.count("no answer") == 1 and message.endswith(f"Same error at {second}")


def test_a_key_for_servers_that_do_not_encrypt(plain, secured):
    _, key = secured
    message, seconds = refusal(plain.places[0].endpoint, key, deadline=30)
    assert "handshake refused" in message and seconds < stretched(20)


def test_a_web_server_at_the_endpoint_is_reported():
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        message, seconds = refusal(f"tcp://127.0.0.1:{web.server_port}", deadline=30)
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
    assert "no graph server speaks there" in message or "handshake refused" in message
    assert seconds < stretched(20)


def test_a_silent_server_is_given_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        message, seconds = refusal(f"tcp://127.0.0.1:{silent.getsockname()[1]}", deadline=2)
    assert "no graph server speaks there" in message and seconds < stretched(20)


def test_another_program_on_the_port_is_given_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as other:
        message, seconds = refusal(f"tcp://127.0.0.1:{other.getsockname()[1]}", deadline=1.5)
    assert "connected, but no graph server speaks there" in message and seconds < stretched(20)


@pytest.mark.parametrize("endpoint", ["10.0.0.2:29601", "tcp://10.0.0.2", "tcp://10.0.0.2:0", "http://a:1", 7, []])
def test_invalid_endpoints_are_refused(endpoint):
    with pytest.raises(SettingsError, match="endpoint"):
        trainer.connect(endpoint)


def test_a_host_name_that_cannot_be():
    with pytest.raises(ServiceError, match="graph server at tcp://gpu1..lan:29601: no answer within"):
        trainer.connect("tcp://gpu1..lan:29601", deadline=1)


def test_a_missing_key_file(tmp_path):
    with pytest.raises(
        ServiceError, match=r"none.key cannot be read: No such file or directory; .*`gnnfleet serve key"
    ):
        trainer.connect("tcp://10.0.0.2:29601", tmp_path / "none.key")


def test_a_model_over_a_remote_graph(tmp_path):
    # Inference with whole neighbourhoods equals a full-graph forward pass.
    from torch_geometric.nn import SAGEConv

    folder, conv = written(tmp_path, hetero_data()), SAGEConv((4, 4), 3)
    with serving_parts(folder) as servers, trainer.connect(servers.places[0].endpoint) as graph:
        rows = []
        for batch in DistNeighborLoader(graph, [-1], "paper", batch_size=16):
            edges = batch["paper", "cites", "paper"].edge_index
            rows.append(conv((batch["paper"].x, batch["paper"].x), edges)[: batch["paper"].batch_size])
    data = hetero_data()
    expected = conv((data["paper"].x, data["paper"].x), data["paper", "cites", "paper"].edge_index)
    torch.testing.assert_close(torch.cat(rows), expected)
