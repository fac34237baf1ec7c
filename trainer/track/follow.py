"""Follows a run and sends its metrics to trackers: ``python -m trainer track RUN_DIR``, a process of its own.

It only reads files that others write, so it can neither stop nor slow a step. Each tracker has a thread: one that is
slow falls behind, one that fails is tried again, and at the end the process waits for all of them for a bounded time.
docs/ARCHITECTURE.md, "Trackers", describes the files in RUN_DIR/track/.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import click

from trainer.core.errors import SettingsError
from trainer.core.files import read_json, write_whole
from trainer.track.tracker import Job, Point, flat, make_tracker

FOLDER = "track"  #: folder in the run folder

PATIENCE = 10.0  #: seconds that trackers get once the run has ended

_PAUSE = 1.0  # seconds between two looks at the files

_AGAIN = 30.0  # seconds after a failure before a tracker is tried again

_SYSTEM = 10.0  # seconds between two points of the nodes' figures

_AT_ONCE = 500  # points that are logged before the tracker's place is saved

_LOGIN = re.compile(r"://[^/@\s]*@")

_NICE = 5  # ranks come first on a busy machine


class _Following:
    """One tracker of a run. ``track/<tracker>.json`` has its place in the curves, from which a resumed run goes on."""

    def __init__(self, run_dir: Path, name: str, job: Mapping[str, Any], ended: threading.Event) -> None:
        self.name, self._job, self._ended = name, job, ended
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._path = self._folder / f"{name}.json"
        known = read_object(self._path)
        runs = [run for run in known.get("runs", ()) if run != job["run_id"]]
        fresh = {"id": "", "url": "", "folder": "", "began": time.time(), "done": {}}
        now = {"runs": [*runs, job["run_id"]], "problem": "", "complete": False}
        self.state: dict[str, Any] = {**fresh, **known, **now}  #: content of the file
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            last = self._ended.is_set()
            try:
                return self._follow()
            except SettingsError as error:  # another attempt would not help
                return self.complain(str(error))
            except Exception as error:
                words = _LOGIN.sub("://", " ".join(str(error).split()))  # clients name the address, with its password
                self.complain(f"{type(error).__name__}: {words[:300]}")
            if last:
                return
            self._ended.wait(_AGAIN)

    def _follow(self) -> None:
        """Open the run, log what is new until the run has ended, and close it."""
        state, job = self.state, self._job
        about = Job(job["run_id"], self._folder, job["config"], state["runs"][:-1])
        tracker = make_tracker(self.name, about, job["trackers"][self.name] or {}, state["id"])
        self.save(**tracker.place._asdict())
        tail, shown = _Tail(self._run_dir / "metrics-rank0.jsonl"), 0.0
        result: dict[str, Any] = {}
        while True:
            last = self._ended.is_set()  # looked at before the files, which are complete by then
            lines = tail.lines()
            result = next((line for line in reversed(lines) if line.get("kind") == "result"), result)
            points = _new_points(lines, done := dict(state["done"]))
            while some := list(islice(points, _AT_ONCE)):
                tracker.log(some)
                self.save(done=dict(done), problem="")
            found = read_object(self._folder / "nodes.json")
            if found and found["t"] > shown + (0 if last else _SYSTEM):
                figures: dict[str, float] = {}  # the last ones of all nodes and ranks, as the supervisors know them
                for kind in ("node", "rank"):
                    for number, known in found[f"{kind}s"].items():
                        figures |= _scalars(known, f"system/{kind}{number}")
                tracker.log([Point("seconds", max(0, round(found["t"] - state["began"])), found["t"], figures)])
                shown = found["t"]
            if last:
                break
            self._ended.wait(_PAUSE)
        end = read_object(self._folder / "end.json")
        named = {name: value for name, value in result.items() if name not in ("t", "kind", "rank", "epoch_seconds")}
        tracker.end(end.get("state", "failed"), {**named, **end.get("report", {})})
        self.save(complete=True, problem="")

    def complain(self, why: str) -> None:
        """Print why the tracker lacks something, once while it lasts."""
        if not self.state["problem"]:
            print(f"{self.name}: {why}", flush=True)
        self.save(problem=why)

    def save(self, **values: Any) -> None:
        with self._lock:
            self.state |= values
            with suppress(OSError):  # a full disk, which the run itself reports
                write_whole(self._path, json.dumps(self.state))

    def give_up(self, why: str) -> None:
        """Record that the process ends before the tracker is ready; from now on its thread saves nothing."""
        self.complain(why)
        self._lock.acquire()


class _Tail:
    """Reads the whole lines of JSON that are appended to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for text in whole.splitlines():
            with suppress(ValueError):  # cut off by a full disk
                line = json.loads(text)
                if isinstance(line, dict):
                    found.append(line)
        return found


def read_object(path: Path) -> dict[str, Any]:
    """Return an object from a JSON file; {} if it does not exist (yet) or is damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def follow(run_dir: Path) -> None:
    """Follow a run until ``track/end.json`` exists, or until the process that started this one has ended.

    Threads of trackers that were not ready go on, but save nothing any more.
    """
    folder, parent = run_dir / FOLDER, os.getppid()
    lock = open(folder / "lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier process may still be ending
    if (before := folder / "before").is_dir():  # of the run that this one resumes
        shutil.copytree(before, folder, ignore=shutil.ignore_patterns(".gnnfleet-*"), dirs_exist_ok=True)
        shutil.rmtree(before)
    job, ended = read_object(folder / "job.json"), threading.Event()
    trackers = [_Following(run_dir, name, job, ended) for name in job["trackers"]]
    for one in trackers:
        one.thread.start()
    while not (folder / "end.json").exists() and any(one.thread.is_alive() for one in trackers):
        if os.getppid() != parent:
            words = {"state": "failed", "report": {"reason": "its supervisor has ended"}}
            write_whole(folder / "end.json", json.dumps(words))
        time.sleep(0.2)
    ended.set()
    patience = float(read_object(folder / "end.json").get("patience", PATIENCE))
    deadline = time.monotonic() + patience
    for one in trackers:
        one.thread.join(max(0.0, deadline - time.monotonic()))
        if one.thread.is_alive():
            one.give_up(f"it was not ready {patience:g} s after the end of the run, and lacks its last values")


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def track(run_dir: Path) -> None:
    """Send the metrics of a run to its trackers; rank 0 or its supervisor starts this."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job, whose end is still to be recorded
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    follow(run_dir)
    sys.stdout.flush()
    os._exit(0)  # does not wait for threads


#: Fields of a metrics line that are no values of a curve.
_POSITION = ("t", "kind", "rank", "epoch", "step", "steps", "by_host", "saved", "step_loss")


def _new_points(lines: Iterable[Mapping[str, Any]], done: dict[str, int]) -> Iterator[Point]:
    """Yield the points of metrics lines of rank 0 that are further than what a tracker has.

    done: the last place of each curve that the tracker has; updated. Lines that an own script has written may lack any
    field.
    """
    for line in lines:
        kind, t, epoch = line.get("kind"), float(line.get("t") or 0), line.get("epoch")
        if not isinstance(epoch, int):
            continue
        found: list[tuple[str, Point]] = []  # each with the name of its curve
        if kind == "step" and isinstance(line.get("step"), int) and isinstance(line.get("steps"), int):
            place = (epoch - 1) * line["steps"] + line["step"] + 1
            found.append(("step", Point("step", place, t, _scalars(line, "step"))))
        elif kind == "epoch":
            found.append(("epoch", Point("epoch", epoch, t, _scalars(line, "epoch"))))
            losses, seconds = line.get("step_loss") or (), float(line.get("seconds") or 0)
            for i, loss in enumerate(losses, start=1):  # at times spread evenly over the epoch
                at, then = (epoch - 1) * len(losses) + i, t - seconds * (1 - i / len(losses))
                found.append(("step_loss", Point("step", at, then, {"step/loss_of_all_ranks": loss})))
        elif kind == "eval":
            split = line.get("split") or "val"
            found.append((f"eval/{split}", Point("epoch", epoch, t, _scalars(line, f"eval/{split}"))))
        for curve, point in found:
            if point.at > done.get(curve, 0) and point.values:
                done[curve] = point.at
                yield point


def _scalars(tree: Mapping[str, Any], above: str) -> dict[str, float]:
    shown = {name: value for name, value in tree.items() if name not in _POSITION}
    return {name: float(value) for name, value in flat(shown, above, "/").items() if type(value) in (int, float)}
