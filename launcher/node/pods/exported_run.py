"""The files of an exported run as a pod sees them, waiting for the run's other pods, and errors of pods' programs."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.node.json_reader import loads, read_json
from launcher.node.record import write_json
from launcher.node.remote_folder import StoreError

FORMAT, VERSION = "gnnfleet-export", 1

#: Placeholders in the exported files: folder of gnnfleet's code and interpreter in the image, secret of the run.
CODE, PYTHON, TOKEN = "@CODE@", "@PYTHON@", "@TOKEN@"

CODE_FOLDER = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))

FETCHED = "fetched.json"  #: file of a node run folder: how many bytes of its parts the node has fetched

POLL = 0.5  #: seconds

_REPORT_EVERY = 30.0  # seconds between two lines about what the pod waits for

_LOOK_EVERY = 5.0  # seconds between two looks at the fetches of all nodes

_SILENT = 60.0  # seconds without a heartbeat after which a program counts as dead


class Unusable(Exception):
    """The run cannot work as it was exported; another attempt would fail as well."""


class TooLate(Exception):
    """Something that other pods do has not happened in time."""


def run_program(program: Callable[[], int]) -> int:
    """Run the program of a pod and return its exit status.

    Unusable, TooLate, StoreError and OSError are printed; the status is then 2 (Unusable) or 1.
    """
    status = 1
    try:
        return program()
    except Unusable as error:
        text, status = str(error), 2
    except (TooLate, StoreError) as error:
        text = str(error)
    except OSError as error:
        text = (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))
    print(f"error: {text}", file=sys.stderr, flush=True)
    return status


class ExportedNode:
    """One node of an exported run, read from ``run``, in the environment ``environ`` of its container."""

    def __init__(self, run: str, environ: Mapping[str, str]) -> None:
        self.run = run
        path = os.path.join(self.run, "export.json")
        try:
            export: Any = read_json(path)
        except (OSError, ValueError) as error:
            raise Unusable(f"{path} cannot be read: {error}") from None
        if export is None:
            raise Unusable(f"{path} does not exist; mount the ConfigMap of the run")
        if (export.get("format"), export.get("version")) != (FORMAT, VERSION):
            raise Unusable(f"{path} was written by gnnfleet {export.get('gnnfleet')}, which this image cannot read")
        self.export = dict(export)
        self.node_rank = _number(environ, "GNNFLEET_FIRST_NODE") + _number(environ, "JOB_COMPLETION_INDEX")
        folders = self.export["run_dirs"]
        if self.node_rank >= len(folders):
            raise Unusable(f"this pod would be node{self.node_rank}, but the run has {len(folders)} nodes")
        self.run_dir, self.lead_dir = folders[self.node_rank], folders[self.export["lead"]]
        self.leads = self.node_rank == self.export["lead"]
        self.deadline = time.monotonic() + self.export["wait"]

    def node_file(self, token: str = "") -> dict[str, Any]:
        """Return the content of ``node<k>.json``. ``token``: replaces the placeholder of the run's secret."""
        node: dict[str, Any] = loads(self.text(f"node{self.node_rank}.json", token))
        return node

    def text(self, name: str, token: str) -> str:
        """Return the text of a file of the ConfigMap, without placeholders. Raises Unusable."""
        try:
            with open(os.path.join(self.run, name), encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise Unusable(f"{error.filename}: {error.strerror}; export the run again") from None
        for mark, value in ((CODE, CODE_FOLDER), (PYTHON, sys.executable), (TOKEN, token)):
            text = text.replace(mark, json.dumps(value)[1:-1])
        return text

    def path(self, *names: str) -> str:
        """Return a path in the node run folder."""
        return os.path.join(self.run_dir, *names)

    # Waiting.

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until ``done`` returns true. Raises TooLate with the text ``what`` after the time limit of the export.

        The limit begins anew whenever a node's fetch of its parts has made progress.
        """
        report = look = time.monotonic() + POLL
        before = None
        while not done():
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_EVERY
                after = [_json_or_none(os.path.join(folder, FETCHED)) for folder in self.export["run_dirs"]]
                if before is not None and after != before:
                    self.deadline = now + self.export["wait"]
                before = after
                os.makedirs(self.run_dir, exist_ok=True)
                write_json(self.path("waiting.json"), {"time": time.time()})
            if now > self.deadline:
                raise TooLate(f"waited {self.export['wait']:g} s {what}")
            if now > report:
                print(f"waiting {what}", flush=True)
                report = now + _REPORT_EVERY
            time.sleep(POLL)

    def alive(self) -> bool:
        """Whether the supervisor, or this program while it waits, has written its heartbeat in the last minute."""
        beats = [_json_or_none(self.path(name)) for name in ("state.json", "waiting.json")]
        return any(beat and abs(time.time() - float(beat["time"])) < _SILENT for beat in beats)


def resolves(name: str) -> bool:
    """Whether the DNS name of a pod has an address, as it has while the pod runs."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _json_or_none(path: str) -> Any:
    """Return the content of a JSON file; None if there is none, or if it is damaged."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise Unusable(f"{name} is not a number; run this program in a pod of the exported Indexed Job") from None
