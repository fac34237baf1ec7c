"""Tests of ``NetCluster``, which other tests use: its hosts behave like separate machines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest

import netns
from netns import Host, NetCluster
from waiting import wait_until


def ssh(host: Host, command: str) -> subprocess.CompletedProcess[str]:
    config = str(host.cluster.operator_ssh_config)
    return subprocess.run(["ssh", "-F", config, host.name, command], capture_output=True, text=True, timeout=20)


def paramiko_client(host: Host, **options: str) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    client.load_host_keys(str(host.cluster.operator_ssh_config.with_name("known_hosts")))
    client.connect(host.address, allow_agent=False, look_for_keys=False, timeout=10, **options)
    return client


def answers(host: Host) -> bool:
    try:
        with socket.create_connection((host.address, 22), timeout=0.5) as line:
            return line.recv(4) == b"SSH-"
    except OSError:
        return False


def settled(host: Host, wanted: list[str]) -> bool:
    """Wait up to ten seconds until exactly the processes ``wanted`` run on the host. Returns whether they do."""
    deadline = time.monotonic() + 10
    while [process.cmdline for process in host.processes()] != wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_openssh_reaches_every_host(cluster: NetCluster) -> None:
    for host in cluster.hosts:
        done = ssh(host, "hostname; echo $HOME; pwd")
        assert done.stdout.split() == [host.name, host.home, host.home], done.stderr


def test_paramiko_and_sftp_reach_every_host(cluster: NetCluster) -> None:
    for host in cluster.hosts:
        with paramiko_client(host, username="root", key_filename=str(cluster.identity)) as client:
            assert client.exec_command("hostname")[1].read().decode().strip() == host.name
            with client.open_sftp().open("greeting", "w") as file:
                file.write("hello")
        assert host.root_path("~/greeting").read_text() == "hello"


def test_hosts_reach_each_other_by_address_and_name(cluster: NetCluster) -> None:
    first, second, _ = cluster.hosts
    for name in (second.address, second.name):
        assert first.run(["bash", "-c", f"exec 3<>/dev/tcp/{name}/22; head -c 4 <&3"]).stdout == "SSH-"


def test_hosts_share_no_data(cluster: NetCluster, tmp_path: Path) -> None:
    first, second, _ = cluster.hosts
    for folder in ("/tmp", "/run", "/dev/shm", first.home):
        own = f"{folder}/only-on-{first.name}"
        first.write(own, "1")
        assert not second.root_path(own).exists() and not Path(own).exists()
    assert not first.root_path(tmp_path).exists()


def test_hosts_see_the_repository_and_its_python(cluster: NetCluster) -> None:
    program = "import paramiko, launcher; print(launcher.__file__)"
    done = cluster.hosts[0].run(["env", f"PYTHONPATH={netns.REPOSITORY}", sys.executable, "-c", program])
    assert done.stdout.strip() == str(netns.REPOSITORY / "launcher/__init__.py")


def test_hosts_have_their_own_processes(cluster: NetCluster) -> None:
    first, second, _ = cluster.hosts
    assert ssh(first, "sleep 98765 >/dev/null 2>&1 &").returncode == 0
    assert settled(first, ["sleep 98765"]) and settled(second, [])
    first.kill(first.processes()[0].pid)
    assert settled(first, [])


def test_a_hidden_program_is_missing_on_that_host_only(cluster: NetCluster) -> None:
    first, second, _ = cluster.hosts
    first.hide("/usr/bin/find")
    assert first.run(["bash", "-c", "command -v find"], check=False).returncode == 1
    assert second.run(["bash", "-c", "command -v find"]).stdout
    assert Path("/usr/bin/find").exists()
    first.unhide()
    assert first.run(["find", "/etc/hostname"]).stdout


def test_a_cut_network_drops_packets_until_it_is_restored(cluster: NetCluster) -> None:
    host = cluster.hosts[0]
    with socket.create_connection((host.address, 22)) as line:
        assert line.recv(4) == b"SSH-"
        host.cut_network()
        assert not answers(host)
        assert answers(cluster.hosts[1])
        host.restore_network()
        line.sendall(b"SSH-2.0-test\r\n")
        assert line.recv(100), "a connection opened before the cut still works"
    assert answers(host)


def test_a_power_cut_kills_without_closing_connections(make_cluster: Callable[..., NetCluster]) -> None:
    [host] = make_cluster(1).hosts
    host.write("~/kept", "1")
    host.write("/tmp/lost", "1")
    host.hide("/usr/bin/find")
    ssh(host, "sleep 98765 >/dev/null 2>&1 &")
    with socket.create_connection((host.address, 22)) as line:
        assert line.recv(4) == b"SSH-"
        host.power_cut()
        line.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while line.recv(4096):  # the rest of the banner may be buffered; no FIN may follow
                pass
    assert not answers(host) and host.processes() == []
    host.power_on()
    host.wait_until_up()
    assert ssh(host, "cat kept; ls /tmp/lost; command -v find").stdout == "1"
    assert host.processes() == []


@pytest.mark.slow
def test_slow_link_limits_the_rate(cluster: NetCluster) -> None:
    host, size = cluster.hosts[0], 1_500_000

    def seconds() -> float:
        start = time.monotonic()
        assert len(ssh(host, f"head -c {size} /dev/zero").stdout) == size
        return time.monotonic() - start

    host.slow_link("2mbit")
    slow = seconds()
    host.full_speed()
    assert slow > 0.8 * size * 8 / 2e6
    assert any(seconds() < slow / 2 for _ in range(3)), "a single login may be slow"


def test_password_login(make_cluster: Callable[..., NetCluster]) -> None:
    [host] = make_cluster(1, password=True).hosts
    for user in ("root", netns.PASSWORD_USER):
        with paramiko_client(host, username=user, password=netns.PASSWORD) as client:
            assert client.exec_command("pwd")[1].read().decode().strip() == host.home
        with pytest.raises(paramiko.AuthenticationException):
            paramiko_client(host, username=user, password="wrong")


def test_shared_folder_is_the_same_everywhere(make_cluster: Callable[..., NetCluster], tmp_path: Path) -> None:
    first, second = make_cluster(2, shared_folder=tmp_path).hosts
    first.run(["bash", "-c", f"echo shared > {tmp_path}/file"])
    assert second.run(["cat", f"{tmp_path}/file"]).stdout == (tmp_path / "file").read_text() == "shared\n"


def test_nothing_is_left_after_closing_a_cluster() -> None:
    with NetCluster(2) as cluster:
        ssh(cluster.hosts[0], "sleep 98765 >/dev/null 2>&1 &")
        process_ids = [host.init_pid for host in cluster.hosts]
    assert_gone(cluster.name)
    assert all(netns.state(pid) in ("", "Z") for pid in process_ids)


def test_leftovers_of_a_killed_process_are_removed() -> None:
    program = "import netns, time\nwith netns.NetCluster(1) as c: print(c.name, flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    assert f"{name}h0" in os.listdir("/run/netns")
    child.kill()
    child.wait()
    netns.remove_leftovers()
    assert_gone(name)


def test_two_clusters_at_once() -> None:
    names: list[str] = []

    def start() -> None:
        with NetCluster(1) as cluster:
            names.append(cluster.hosts[0].run(["hostname"]).stdout.strip())

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 3


def assert_gone(name: str) -> None:
    def left() -> list[str]:
        links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout.splitlines()
        folders = [*os.listdir("/run/netns"), *os.listdir(netns.STATE)]
        return [each for each in (*links, *folders) if each.startswith(name)]

    # the kernel removes the links of a namespace some time later, and other test processes may be removing leftovers
    wait_until(lambda: not left(), 60)
