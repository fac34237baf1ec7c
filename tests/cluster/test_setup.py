"""Tests of ``gnnfleet setup`` on real hosts: from bare hosts to a trained model, and where hosts get their wheels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.node.programs.packages import PACKAGES
from launcher.setup import setup as program
from launching import REPOSITORY
from netns import NetCluster
from netns_tools import ip
from operator_kit import Operator
from setup_kit import REQUIREMENTS, make_index, served
from waiting import stretched

#: What Debian's packages python3.11-venv and python3-pip contain. Other systems have other paths.
NOT_ON_A_BARE_HOST = ("/usr/lib/python3.11/ensurepip", "/usr/lib/python3/dist-packages/pip")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_from_three_bare_hosts_to_a_trained_model(make_cluster: Callable[..., NetCluster], tmp_path: Path) -> None:
    # The hosts have python3, sshd and tmux, and no route to the package index. A launcher that is killed while it sends
    # wheels leaves no environment, and the next setup goes on.
    cluster = make_cluster(3)
    for host in cluster.hosts:
        for path in filter(os.path.exists, NOT_ON_A_BARE_HOST):
            host.hide(path)
    operator = Operator(cluster, tmp_path / "home")
    names = [host.name for host in cluster.hosts]
    written = operator.gnnfleet("init", *names, "--dataset", "synthetic", "-o", "cluster.yml")
    assert written.status == 3 and "To install them: python launch.py setup --config cluster.yml" in written.output

    sending = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "launch.py"), "setup", "--config", "cluster.yml", "--yes"],
        cwd=operator.cwd, env=operator.env, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    part = cluster.hosts[1].root_path("~/gnnfleet-venv.setup/wheels")
    deadline = time.monotonic() + 600
    while not part.is_dir() or not any(part.iterdir()):
        assert sending.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    sending.send_signal(signal.SIGKILL)
    sending.wait()
    assert not cluster.hosts[1].root_path("~/gnnfleet-venv").exists()

    done = operator.gnnfleet("setup", "--config", "cluster.yml", "--yes", timeout=900)
    assert done.status == 0, done.output
    assert done.output.count("sent from this machine") == 3 and "Set up 3 hosts." in done.output
    for host in cluster.hosts:
        python = f"{host.home}/gnnfleet-venv/bin/python"
        code = f"from importlib.metadata import version; print(*map(version, {PACKAGES}))"
        versions = [metadata.version(name).partition("+")[0] for name in PACKAGES]
        found = host.run([python, "-c", code]).stdout.split()
        assert [version.partition("+")[0] for version in found] == versions
        assert not host.root_path("~/gnnfleet-venv.setup").exists()

    started = time.monotonic()
    again = operator.gnnfleet("setup", "--config", "cluster.yml")
    assert again.status == 0 and "Nothing to do: 3 nodes complete." in again.output, again.output
    assert time.monotonic() - started < stretched(5)

    small = ("--set", "data.options.num_nodes=2000", "--set", "run.start_timeout=600", "--set", "train.timeout=600")
    trained = operator.gnnfleet("--config", "cluster.yml", "--epochs", "1", "--plain", *small, timeout=900)
    assert trained.status == 0 and "test accuracy" in trained.output, trained.output


@pytest.fixture
def local_index(cluster: NetCluster, tmp_path: Path) -> Iterator[str]:
    """Serve tiny wheels on a second address of the hosts' network bridge; yields the URL. Host 1 cannot reach it."""
    address = f"{cluster.prefix}.2"
    ip(f"addr add {address}/24 dev {cluster.bridge}")
    cluster.hosts[1].run(["ip", "route", "add", "blackhole", f"{address}/32"])
    try:
        with served(make_index(tmp_path / "index"), address=address) as url:
            yield url
    finally:
        cluster.hosts[1].run(["ip", "route", "del", "blackhole", f"{address}/32"])
        ip(f"addr del {address}/24 dev {cluster.bridge}")


@pytest.mark.slow
def test_wheels_are_downloaded_or_sent_and_a_shared_folder_is_set_up_once(
    cluster: NetCluster,
    local_index: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = local_index.rpartition("/")[2].rpartition(":")[0]
    pip = {"NO_INDEX": "1", "FIND_LINKS": f"{local_index}/", "TRUSTED_HOST": host, "CONFIG_FILE": "/dev/null"}
    for name, value in pip.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("HOME", str(cluster.operator_home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(program, "required", lambda more: REQUIREMENTS)
    cluster.hosts[2].hide("/usr/bin/tmux")
    shared = f"{cluster.shared_folder}/env"
    first, second, third = (each.name for each in cluster.hosts)
    file = tmp_path / "cluster.yml"
    file.write_text(
        f"nodes: [{{host: {first}, venv: ~/own}}, {{host: {second}, venv: ~/own}}, "
        f"{{host: {first}, venv: {shared}}}, {{host: {third}, venv: {shared}}}]\ndata: {{dataset: synthetic}}\n"
    )
    assert run(["setup", "--config", str(file), "--yes"]) == 3  # a host lacks tmux
    shown = " ".join(capsys.readouterr().out.split())
    assert f"node0 ({first}) ~/own 3.11 make it: 3 packages, torch 9.1.0+cpu; the host downloads them" in shown
    assert f"node1 ({second}) ~/own 3.11 make it: 3 packages, torch 9.1.0+cpu; sent from this machine" in shown
    assert f"node3 ({third}) {shared} – the folder of node2 ({first})" in shown
    assert f"node3 ({third}) has no tmux, which runs need. On the host: apt-get install -y tmux" in shown
    for host_, path in zip(cluster.hosts, ("~/own", "~/own", shared), strict=True):
        python = host_.root_path(path) / "bin/python"
        assert host_.run([str(path).replace("~", host_.home) + "/bin/python", "-c", "import torch"]).returncode == 0
        assert python.is_symlink()
    file.write_text(f"nodes: [{{host: {first}, venv: ~/own}}, {{host: {third}, venv: {shared}}}]\n"
                    "data: {dataset: synthetic}\n")  # fmt: skip
    cluster.hosts[2].unhide()
    assert run(["setup", "--config", str(file)]) == 0
    assert "Nothing to do: 2 nodes complete." in capsys.readouterr().out
