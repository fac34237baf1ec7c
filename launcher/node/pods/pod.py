"""Runs one node of a run that ``gnnfleet export --to kubernetes`` has exported: ``pod.py RUN SECRETS``, in a pod.

RUN: folder with ``export.json``, ``node<k>.json``, ``cluster.json``, ``run.json`` and, below ``files/``, the user's own
files. SECRETS: folder with ``token`` and, if the graph service is encrypted, ``service.key``. The node_rank is
``GNNFLEET_FIRST_NODE`` + ``JOB_COMPLETION_INDEX``.

First waits until the parts exist and the lead node has begun an attempt; the lead node waits until all other nodes have
begun it. Then waits until the DNS names of all pods resolve, prepares the node run folder and starts the supervisor,
which prints its events. Also prints the logs of the node's processes. ``pod.py --alive RUN`` only checks that the
supervisor writes ``state.json``.

Exit status: 0 (done), 1 (failed or stopped; another attempt resumes from the newest checkpoint), 2 (the run cannot work
as it was exported).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))

from launcher.node.json_reader import read_json, record_in
from launcher.node.json_records import RESULT
from launcher.node.pods.exported_run import CODE_FOLDER, POLL, ExportedNode, Unusable, resolves, run_program
from launcher.node.programs.machine import cpus
from launcher.node.record import write_json, write_text
from launcher.node.supervisor.attempt import archive, newest_checkpoint
from launcher.node.watch import Watcher


class Pod(ExportedNode):
    """One node of an exported run: its attempts, its files and its supervisor."""

    # What the pod waits for.

    def await_parts(self) -> None:
        """Wait until this node's partition folder is complete; returns at once if it has none. Raises TooLate."""
        folder = self.export["data_dirs"][self.node_rank]
        if folder:
            manifest = os.path.join(folder, "manifest.json")
            self.wait(lambda: os.path.exists(manifest), f"for the parts: there is no {manifest}")

    def begin_attempt(self) -> int:
        """Begin the next attempt of this node and return its number, counted from 0. Raises TooLate.

        The lead node begins its next attempt at once. Any other node waits until the attempt number of the lead node is
        higher than the number of its own last attempt; then it takes the lead node's number. So the supervisor of a
        restarted pod does not connect to supervisors that are about to end. Files of this node's last attempt are moved
        to ``attempts/``.
        """
        last = self._attempt(self.run_dir)
        if last >= 0:
            archive(self.run_dir, last)
            for name in ("state.json", "result.json", "waiting.json"):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.run_dir, name))
            shutil.rmtree(os.path.join(self.run_dir, "control"), ignore_errors=True)
        if not self.leads:
            text = f"for node{self.export['lead']}: it has not begun attempt {last + 1} in {self.lead_dir}"
            self.wait(lambda: self._attempt(self.lead_dir) > last, text)
        number = last + 1 if self.leads else self._attempt(self.lead_dir)
        os.makedirs(os.path.join(self.run_dir, "logs"), exist_ok=True)
        write_json(os.path.join(self.run_dir, "attempt.json"), {"attempt": number})
        return number

    @staticmethod
    def _attempt(run_dir: str) -> int:
        with suppress(OSError, ValueError, TypeError, KeyError):  # none has begun, or the file cannot be read now
            return int(read_json(os.path.join(run_dir, "attempt.json"))["attempt"])
        return -1

    def await_others(self, attempt: int) -> None:
        """Wait until all nodes have begun ``attempt``, if this is the lead node. Raises TooLate.

        So a supervisor does not meet nodes that still fetch their parts.
        """
        for k, folder in enumerate(self.export["run_dirs"]) if self.leads else ():

            def has_begun(folder: str = folder) -> bool:
                return self._attempt(folder) >= attempt

            self.wait(has_begun, f"for node{k} to begin attempt {attempt}")

    def await_names(self) -> None:
        """Wait until the DNS names of all nodes resolve, that is, until their pods run. Raises TooLate."""
        for k, name in enumerate(self.export["addresses"]):
            self.wait(partial(resolves, name), f"for node{k}: {name} has no address")

    # Files.

    def write_files(self, secrets: str, attempt: int) -> dict[str, str]:
        """Write the node run folder; return the environment variables of the supervisor."""
        token = hashlib.sha256(f"{_secret(secrets, 'token')}:{attempt}".encode()).hexdigest()
        node = self.node_file(token)
        spec = node["spec"]
        if spec["trainer"] is not None:
            env = spec["trainer"]["env"]
            env.setdefault("OMP_NUM_THREADS", str(max(1, cpus() // len(spec["nodes"][self.node_rank]["ranks"]))))
            checkpoint = newest_checkpoint(self.lead_dir) if attempt else None
            if checkpoint is not None:
                env["GNNFLEET_RESUME"] = os.path.join(self.lead_dir, "checkpoints", checkpoint["file"])
                print(f"attempt {attempt}: resuming from {env['GNNFLEET_RESUME']}", flush=True)
        write_text(self.path("cluster.json"), self.text("cluster.json", token))
        self._write_private("run.json", self.text("run.json", token))
        self._write_private("node.json", json.dumps(spec))
        if self.export["encrypted"]:
            self._write_private("service.key", _secret(secrets, "service.key"))
        # Without the links by which Kubernetes updates a mounted ConfigMap.
        shutil.rmtree(self.path("files"), ignore_errors=True)
        os.makedirs(self.path("files"))
        for item in self.export["files"]:
            dest = self.path("files", *item["path"].split("/"))
            os.makedirs(os.path.dirname(dest), exist_ok=True)
            shutil.copyfile(os.path.join(self.run, item["key"]), dest)
            os.chmod(dest, item["mode"])
        return dict(node["env"])

    def _write_private(self, name: str, text: str) -> None:
        path = self.path(name)
        with suppress(FileNotFoundError):
            os.unlink(path)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)

    # The supervisor.

    def supervise(self, env: Mapping[str, str]) -> int:
        """Run the supervisor to its end; return 0 (done) or 1.

        Meanwhile, pass SIGTERM on to the supervisor, and print new lines of the logs of other processes.
        """
        program = os.path.join(CODE_FOLDER, "launcher", "node", "supervisor", "supervisor.py")
        argv = [sys.executable, program, self.path("node.json")]
        child = subprocess.Popen(argv, cwd=self.run_dir, env={**os.environ, **env})
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _: child.send_signal(received))
        logs = _LogPrinter(self.run_dir, only=("logs/rank*.log", "logs/runners.log", "logs/server.log"))
        while child.poll() is None:
            logs.emit_lines()
            time.sleep(POLL)
        while logs.emit_lines():
            pass
        result = record_in(RESULT, self.path("result.json"))
        if result is None:
            print(f"node{self.node_rank}: its supervisor ended without a result", flush=True)
            return 1
        why = f": {result['reason']}" if result["reason"] else ""
        print(f"node{self.node_rank}: {result['state']}{why}", flush=True)
        if result["state"] != "done":
            return 1
        # A node that only serves is done, too, when a failure elsewhere has stopped it; it must then run again.
        spec = read_json(self.path("node.json"))
        return 0 if spec["trainer"] is not None or not result["reason"] else 1


class _LogPrinter(Watcher):
    """Prints lines that are appended to the logs of a run folder from now on, as ``rank0 | line``."""

    def __init__(self, run_dir: str, only: tuple[str, ...]) -> None:
        super().__init__(run_dir, {}, only)
        self.offsets = dict(self.files())

    def emit(self, message: dict[str, Any]) -> None:
        name = os.path.basename(message["file"])[: -len(".log")]
        for line in message["lines"]:
            print(f"{name} | {line}")
        sys.stdout.flush()


def _secret(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise Unusable(f"{error.filename}: {error.strerror}; apply the Secret of the run") from None


def _run_node(options: argparse.Namespace) -> int:
    pod = Pod(options.run, os.environ)
    if options.alive:
        return 0 if pod.alive() else 1
    pod.await_parts()
    attempt = pod.begin_attempt()
    pod.await_others(attempt)
    pod.await_names()
    return pod.supervise(pod.write_files(options.secrets, attempt))


def main() -> int:
    parser = argparse.ArgumentParser(prog="pod.py", description="Runs one node of an exported run.")
    parser.add_argument("run", help="folder with the ConfigMap of the run")
    parser.add_argument("secrets", nargs="?", default="", help="folder with the Secret of the run")
    parser.add_argument("--alive", action="store_true", help="check that the heartbeat of this node is recent")
    options = parser.parse_args()
    return run_program(partial(_run_node, options))


if __name__ == "__main__":
    sys.exit(main())
