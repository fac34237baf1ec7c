"""Program on the operator's host that compares the login of plain ``ssh`` with that of gnnfleet.

Reads a JSON list of variants (home folder and host) from stdin; prints the result of each as a JSON line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.command import Command
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import TransportError
from launcher.transport import open_transport
from launcher.transport.openssh import OpenSshTransport

HOME = Path.home()
TIMEOUT = 15.0  # generous, because the machine may be busy
HANGS = 80.0  #: seconds for one variant; then the stacks of all threads are printed and the program exits


def main() -> None:
    for variant in json.load(sys.stdin):
        print(f"variant {variant['name']}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        with prepared(variant):
            by_ssh, said = with_ssh(variant["host"])
        with prepared(variant):
            by_us, error, program = with_ours(variant["host"])
        answer = {"name": variant["name"], "ssh": by_ssh, "ours": by_us, "said": said, "error": error, "by": program}
        print(json.dumps(answer), flush=True)


@contextlib.contextmanager
def prepared(variant: dict[str, Any]) -> Iterator[None]:
    shutil.rmtree(HOME / ".ssh", ignore_errors=True)
    for name, text in variant["files"].items():
        path = HOME / ".ssh" / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
    environment = {**variant.get("env", {}), "LANG": "C"}
    with contextlib.ExitStack() as stack:
        if variant.get("agent"):
            agent_socket = stack.enter_context(agent(variant["agent"]))
            if not variant.get("hidden_agent"):
                environment["SSH_AUTH_SOCK"] = agent_socket
        old = dict(os.environ)
        os.environ.pop("SSH_AUTH_SOCK", None)
        os.environ.update(environment)
        before = variant.get("before")
        if before:
            subprocess.run(before, shell=True, check=True, timeout=TIMEOUT, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            if variant.get("after"):
                subprocess.run(variant["after"], shell=True, timeout=TIMEOUT, stderr=subprocess.DEVNULL)
            os.environ.clear()
            os.environ.update(old)


@contextlib.contextmanager
def agent(keys: list[str]) -> Iterator[str]:
    path = str(HOME / ".ssh/agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        while not listens(path):
            assert process.poll() is None
            time.sleep(0.01)
        env = {**os.environ, "SSH_AUTH_SOCK": path, "SSH_ASKPASS_REQUIRE": "force", "SSH_ASKPASS": "/bin/echo"}
        names = [str(HOME / ".ssh" / key) for key in keys]
        subprocess.run(["ssh-add", "-q", *names], env=env, check=True, timeout=TIMEOUT)
        for name in names:
            os.remove(name)
        yield path
    finally:
        process.kill()
        process.wait()


def listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


def with_ssh(host: str) -> tuple[bool, str]:
    argv = ["ssh", "-o", "BatchMode=yes", host, "true"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        return False, f"timed out: {error.stderr!r}"
    return done.returncode == 0, done.stderr.strip()


def with_ours(host: str) -> tuple[bool, str, str]:
    config = ClusterConfig((NodeConfig(host=host),), DataConfig("synthetic"), run=RunConfig(connect_timeout=TIMEOUT))
    try:
        transport = open_transport(config, 0)
    except TransportError as error:
        return False, str(error), ""
    try:
        done = transport.run(Command(("true",)), timeout=TIMEOUT)
    except TransportError as error:
        return False, str(error), ""
    finally:
        transport.close()
    return done.returncode == 0, "", "ssh" if isinstance(transport, OpenSshTransport) else "paramiko"


if __name__ == "__main__":
    main()
