"""What preflight refuses on real hosts: one clear message, and nothing has been changed."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from failure_kit import Scene, mount, said_once, unmount
from launching import REPOSITORY, Launched


def unreachable(scene: Scene) -> None:
    scene.nodes[1]["host"] = f"{scene.cluster.prefix}.77"
    scene.run["connect_timeout"] = 2


def wrong_key(scene: Scene) -> None:
    scene.own_home()
    scene.give_keys(0, 2)
    scene.nodes[1]["key"] = make_key(scene.folder / "other", "")


def encrypted_key(scene: Scene) -> None:
    scene.own_home()
    scene.give_keys(0, 2)
    scene.nodes[1]["key"] = make_key(scene.folder / "encrypted", "hush")


def make_key(path: Path, passphrase: str) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)
    return str(path)


def no_tmux(scene: Scene) -> None:
    scene.cluster.hosts[1].hide("/usr/bin/tmux")


def other_torch(scene: Scene) -> None:
    host = scene.cluster.hosts[1]
    host.write("/tmp/odd/torch-2.4.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1\n")
    host.write("/tmp/odd/python", f'#!/bin/sh\nPYTHONPATH=/tmp/odd exec {sys.executable} "$@"\n', mode=0o755)
    scene.nodes[1]["python"] = "/tmp/odd/python"


def wrong_python(scene: Scene) -> None:
    scene.nodes[1]["python"] = "/opt/none/bin/python"


def no_cuda(scene: Scene) -> None:
    del scene.nodes[1]["procs"]
    scene.nodes[1]["devices"] = [0, 99]


def small_disk(scene: Scene) -> None:
    mount(scene, "200k")
    scene.nodes[1]["workdir"] = "/mnt/small/home"


REFUSED: dict[str, tuple[Callable[[Scene], None], list[str]]] = {
    "unreachable host": (unreachable, ["no answer on port 22 within 2 s", "is the machine up"]),
    "wrong key": (wrong_key, ["no key was accepted for root", "other", "ssh-copy-id root@"]),
    "encrypted key without agent": (encrypted_key, ["is encrypted and no ssh-agent is running", "ssh-add"]),
    "no tmux": (no_tmux, ["tmux is not installed", "apt-get install -y tmux"]),
    "other torch": (other_torch, ["torch 2.4.1, but", "on node0", "-m pip install torch=="]),
    "wrong python": (wrong_python, ["cannot run /opt/none/bin/python", "set `python`, `venv` or `conda`"]),
    "no CUDA device": (no_cuda, ["devices", "99" if shutil.which("nvidia-smi") else "nvidia-smi shows none"]),
    "small disk": (small_disk, ["needed at /mnt/small, 205 kB free", "set `workdir` to another disk"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_preflight_names_the_node_and_what_to_do(name: str, scene: Scene) -> None:
    trouble, words = REFUSED[name]
    trouble(scene)
    before = [scene.files(k) for k in range(3)]
    try:
        done = scene.launch()
        after = [scene.files(k) for k in range(3)]
    finally:
        scene.cluster.hosts[1].unhide()
        unmount(scene)
    said_once(done, 3, *words, "nothing was changed there", f"node1 ({scene.nodes[1]['host']})")
    assert "node0 (" not in done.output.split("What to do:")[1], "the other nodes are well"
    assert after == before and scene.left_behind() == []
    assert (done.result["state"], done.result["exit_status"], done.result["nodes"]) == ("failed", 3, [])


def test_an_unknown_host_key_is_shown_whole(scene: Scene) -> None:
    """Also on a narrow terminal: the fingerprint is there to be compared."""
    home = scene.own_home(hosts_known=False)
    scene.give_keys(0, 1, 2)
    scene.env["COLUMNS"] = "80"
    done = scene.launch()
    said_once(done, 3, f"ssh-keyscan {scene.host(1)} >> {home}/.ssh/known_hosts", "accept-new")
    for host in scene.cluster.hosts:
        shown = subprocess.run(["ssh-keygen", "-lf", host.folder / "etc/host_key.pub"], capture_output=True, text=True)
        assert shown.stdout.split()[1] in "".join(done.output.split())
    assert not (home / ".ssh/known_hosts").exists() and scene.left_behind() == []


def test_a_wrong_password_is_refused_and_not_shown(scene: Scene) -> None:
    scene.own_home()
    scene.give_keys(0, 2)
    scene.nodes[1] |= {"user": "worker", "password": True}
    status, output = answer_prompts(scene.config, "not-this-one", scene.cluster.environment(**scene.env, COLUMNS="200"))
    said_once(Launched(status, output, scene.folder), 3, "password of worker was not accepted", "check user and")
    assert "not-this-one" not in output
    assert output.count("Password for worker on") == 2, "asked once more, in case of a slip"
    assert scene.left_behind() == []


def answer_prompts(config: Path, answer: str, env: dict[str, str]) -> tuple[int, str]:
    """launch.py on a terminal of its own, ``answer`` typed whenever it asks; exit status and what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(config.parent)
        os.execve(sys.executable, [sys.executable, str(REPOSITORY / "launch.py"), "--config", config.name], env)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end has closed
        while data := os.read(terminal, 4096):
            shown += data
            if b"Password for" in data:
                os.write(terminal, answer.encode() + b"\n")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_a_busy_master_port_is_named_with_who_holds_it(scene: Scene) -> None:
    host = scene.cluster.hosts[0]
    listens = "import os, socket, time; s = socket.create_server(('', 29555)); os.fork() or time.sleep(60)"
    host.run(["bash", "-c", f'{sys.executable} -c "{listens}" >/dev/null 2>&1'])
    (holder,) = host.processes()
    done = scene.launch("--master_port", "29555")
    assert host.processes() == [holder]
    host.kill(holder.pid)
    said_once(done, 3, f"port 29555 in use (pid {holder.pid}: ", f"node0 ({host.address})", "`run.master_port`")
