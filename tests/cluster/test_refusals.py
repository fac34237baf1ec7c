"""Tests of launches that preflight refuses on real hosts: one clear message, and no file is changed on the nodes."""

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

from failure_kit import Scene, assert_one_message, mount, unmount
from launching import REPOSITORY, Launched


def unreachable(scene: Scene, k: int) -> None:
    scene.nodes[k]["host"] = f"{scene.cluster.prefix}.77"
    scene.run["connect_timeout"] = 2


def wrong_key(scene: Scene, k: int) -> None:
    scene.nodes[k]["key"] = make_key(scene.folder / "other", "")


def encrypted_key(scene: Scene, k: int) -> None:
    scene.nodes[k]["key"] = make_key(scene.folder / "encrypted", "hush")


def make_key(path: Path, passphrase: str) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)
    return str(path)


def no_tmux(scene: Scene, k: int) -> None:
    scene.cluster.hosts[k].hide("/usr/bin/tmux")


def other_torch(scene: Scene, k: int) -> None:
    host = scene.cluster.hosts[k]
    host.write("/tmp/odd/torch-2.4.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1\n")
    host.write("/tmp/odd/python", f'#!/bin/sh\nPYTHONPATH=/tmp/odd exec {sys.executable} "$@"\n', mode=0o755)
    scene.nodes[k]["python"] = "/tmp/odd/python"


def wrong_python(scene: Scene, k: int) -> None:
    scene.nodes[k]["python"] = "/opt/none/bin/python"


def no_cuda(scene: Scene, k: int) -> None:
    del scene.nodes[k]["procs"]
    scene.nodes[k]["devices"] = [0, 99]


def small_disk(scene: Scene, k: int) -> None:
    mount(scene, "200k", k)
    scene.nodes[k]["workdir"] = "/tmp/small/home"


Trouble = tuple[Callable[[Scene, int], None], list[str]]
#: Case -> node rank -> (function that makes the node unusable, texts that the error message must contain).
REFUSED: dict[str, dict[int, Trouble]] = {
    "logins": {
        0: (unreachable, ["no answer on port 22 within 2 s", "check that the machine is up"]),
        1: (wrong_key, ["no key was accepted for root", "other", "ssh-copy-id root@"]),
        2: (encrypted_key, ["is encrypted and no ssh-agent is running", "ssh-add"]),
    },
    "programs": {
        1: (no_tmux, ["tmux is not installed", "apt-get install -y tmux"]),
        2: (wrong_python, ["cannot run /opt/none/bin/python", "set `python`, `venv` or `conda`"]),
    },
    "equipment": {
        0: (small_disk, ["needed at /tmp/small, 205 kB free", "set `workdir` to another disk"]),
        1: (other_torch, ["torch 2.4.1, but", "on node0", "-m pip install torch=="]),
        2: (no_cuda, ["devices", "99" if shutil.which("nvidia-smi") else "nvidia-smi lists no device"]),
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_preflight_names_the_nodes_and_what_to_do(name: str, scene: Scene) -> None:
    if name == "logins":
        scene.own_home()
        scene.give_keys(0, 1, 2)
    for k, (trouble, _) in REFUSED[name].items():
        trouble(scene, k)
    before = [scene.files(k) for k in range(3)]
    try:
        done = scene.launch()
        after = [scene.files(k) for k in range(3)]
    finally:
        unmount(scene, 0)
        scene.cluster.hosts[1].unhide()
    words = [word for _, texts in REFUSED[name].values() for word in texts]
    assert_one_message(done, 3, *words, "nothing was changed on the nodes")
    for k in range(3):
        listed = f"node{k} ({scene.nodes[k]['host']})" in done.output.split("What to do:")[1]
        assert listed == (k in REFUSED[name]), f"node{k}: {done.output}"
    assert after == before and scene.left_behind() == []
    assert (done.result["state"], done.result["exit_status"], done.result["nodes"]) == ("failed", 3, [])


def test_an_unknown_host_key_is_shown_whole(scene: Scene) -> None:
    # The message contains the whole fingerprint of each host key, even on a narrow terminal, so that users can compare
    # it.
    home = scene.own_home(hosts_known=False)
    scene.give_keys(0, 1, 2)
    scene.env["COLUMNS"] = "80"
    done = scene.launch()
    assert_one_message(done, 3, f"ssh-keyscan {scene.host(1)} >> {home}/.ssh/known_hosts", "accept-new")
    for host in scene.cluster.hosts:
        shown = subprocess.run(["ssh-keygen", "-lf", host.folder / "etc/host_key.pub"], capture_output=True, text=True)
        assert shown.stdout.split()[1] in "".join(done.output.split())
    assert not (home / ".ssh/known_hosts").exists() and scene.left_behind() == []


def test_a_wrong_password_is_refused_and_not_shown(scene: Scene) -> None:
    scene.own_home()
    scene.give_keys(0, 2)
    scene.nodes[1] |= {"user": "worker", "password": True}
    status, output = answer_prompts(scene.config, "not-this-one", scene.cluster.environment(**scene.env, COLUMNS="200"))
    assert_one_message(
        Launched(status, output, scene.folder), 3, "password of worker was not accepted", "check user and"
    )
    assert "not-this-one" not in output
    assert output.count("Password for worker on") == 2, "the password is asked for once more"
    assert scene.left_behind() == []


def answer_prompts(config: Path, answer: str, env: dict[str, str]) -> tuple[int, str]:
    """Type ``answer`` at every prompt of launch.py. Return exit status and output."""
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
