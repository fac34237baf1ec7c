"""Test of ``gnnfleet init`` on real hosts: ``gnnfleet check`` accepts the cluster.yml that init writes."""

from __future__ import annotations

import os
import sys

import pytest

from launcher.config.loader import load_config
from netns import NetCluster
from terminal import Terminal


@pytest.mark.slow
def test_init_probes_hosts_and_its_file_passes_check(make_cluster, tmp_path) -> None:
    # `gnnfleet init` finds the virtual environment of each host, saves host keys after the user confirms them, and asks
    # for a password if a host accepts no key. It leaves out an unreachable host and says why.
    cluster: NetCluster = make_cluster(2, password=True)
    for host in cluster.hosts:
        host.run(["ln", "-s", sys.prefix, f"{host.home}/gnnfleet-venv"])
    addresses = [host.address for host in cluster.hosts]
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    env = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache")} | {"SSH_AUTH_SOCK": ""}
    words = ["init", *addresses, f"{cluster.prefix}.77", "--user", "worker", "--dataset", "synthetic"]
    with Terminal(*words, cwd=tmp_path, env=env) as terminal:
        terminal.await_text("Trust these 2 keys").type("y\n")
        terminal.await_text("Log in with a password?").type("y\n")
        terminal.await_text("Password for worker").type("correct-horse-9\n")
        assert terminal.end() == 3
    assert f"left out {cluster.prefix}.77: " in terminal.shown
    config = load_config(tmp_path / "cluster.yml")
    assert [node.host for node in config.nodes] == addresses
    assert {(node.user, node.password, node.venv) for node in config.nodes} == {("worker", True, "~/gnnfleet-venv")}
    assert config.host_keys == "accept-new"
    assert f"# - {cluster.prefix}.77" in (tmp_path / "cluster.yml").read_text()
    with Terminal("check", "--config", "cluster.yml", cwd=tmp_path, env=env) as terminal:
        terminal.await_text("Password for worker").type("correct-horse-9\n")
        assert terminal.end() == 0
    assert "all 2 pairs reach each other" in terminal.shown
