"""The process that launches and follows one trial. It outlives the sweep, as the run outlives the process."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from launcher.errors import FleetError
from launcher.manage.from_python import LaunchedRun, own_process
from launcher.node.json_reader import json_object, records
from launcher.node.json_records import METRIC
from launcher.report.metrics import metrics_files, read_metrics
from launcher.report.run_folder import never_ran
from launcher.sweep.records import Definition, SweepFolder, Trial

_RELEVANT = (b'"eval"', b'"epoch"', b'"stage"', b'"error"')  # kinds of the lines that are read


@dataclass(frozen=True)
class Ending:
    """What the end of a trial's process means.

    ``refused``: nothing was started on the hosts. ``lost``: a host was. ``cut``: the process was killed before it had
    started anything; ``unfollowed``: later, or no host answered it any more, so that the run may still go on.
    """

    kind: Literal["done", "stopped", "failed", "lost", "refused", "cut", "unfollowed"]
    cause: str = ""


class TrialRun:
    """The run of one attempt of a trial, found by its run id, and the process on this machine that follows it.

    While the process lives, it holds a lock: so another sweep process knows it, too, without guessing by its pid.
    """

    def __init__(self, folder: SweepFolder, definition: Definition, trial: Trial):
        self.trial, self.run_id = trial, trial.run_id(definition.name)
        self.run_folder = Path(definition.runs_dir) / self.run_id
        self.stage = ""  #: of the launch, as in launch.json
        self.epoch: int | None = None
        self.followed = 0  #: how often the run was followed again
        self._definition, self._config = definition, folder.config
        self._messages, self._log = folder.file_of(self.run_id, ".jsonl"), folder.file_of(self.run_id, ".log")
        self._offset, self._error = 0, ""
        self._processes: list[subprocess.Popen[bytes]] = []

    def launch(self) -> None:
        """Start the launch, on the trial's hosts and with its values."""
        words = ["launch", "--config", str(self._config.absolute()), "--run-id", self.run_id, "--json"]
        words += [word for host in self.trial.hosts for word in ("--include", host)]
        words += [word for key, text in self.trial.values.items() for word in ("--set", f"{key}={text}")]
        words += ["--wait"] if self._definition.wait else []
        own = self._definition.own_command
        self._start([*words, *(("--", *own) if own else ())])

    def follow(self) -> None:
        """Follow the run again, whose process was killed or could not reach its hosts."""
        self.followed += 1
        self._start(["follow", str(self.run_folder), "--json"])

    def stop(self) -> None:
        """Stop the run, in a process of its own; the process that follows it ends then."""
        argv, environment = own_process(["stop", str(self.run_folder)])
        with self._log.open("ab") as log:
            self._processes.append(_popen(argv, environment, log, log, self._definition.cwd))

    @property
    def alive(self) -> bool:
        """Whether the process lives that launches or follows the run, also if an earlier sweep process started it."""
        for process in self._processes:
            process.poll()
        with suppress(FileNotFoundError), self._messages.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def new_lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield the metrics lines of the run that came since the last call."""
        with suppress(FileNotFoundError), self._messages.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if not any(kind in line[:300] for kind in _RELEVANT):
                    continue
                values = json_object(line) or {}
                if values.get("kind") == "stage":
                    self.stage = str(values.get("stage"))
                elif values.get("kind") == "error":
                    self._error = str(values.get("message"))
                elif values.get("kind") in ("epoch", "eval"):
                    for record in records(METRIC, [line]):
                        self.epoch = max(self.epoch or 0, record.get("epoch", 0))
                        yield record

    def all_lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield all metrics lines that were collected from the hosts, without those of steps."""
        yield from read_metrics(metrics_files(self.run_folder)).lines

    def ending(self) -> Ending:
        """Return how the trial has ended, by its run folder; call it once the process does not live any more."""
        try:
            run = LaunchedRun(self.run_folder)
            result = run.result
        except FleetError:
            return self._nothing_ran()
        if result is None:
            return self._nothing_ran() if never_ran(self.run_folder) else Ending("unfollowed", self._error)
        if result["state"] == "done":
            return Ending("done")
        if result["state"] == "stopped":
            return Ending("stopped", f"stopped by {result.get('stopped_by') or 'somebody'}")
        first = result.get("first_failure")
        if first is not None and first.get("name") == "node" and not first.get("found"):
            return Ending("lost", run.cause)
        return Ending("refused" if never_ran(self.run_folder) else "failed", run.cause or self._error)

    def _nothing_ran(self) -> Ending:
        status = self._processes[-1].returncode if self._processes else None
        if self._error or status is None or not 0 < status < 128:  # a signal, which the program reports as 128 and more
            return Ending("refused", self._error) if self._error else Ending("cut")
        said = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        return Ending("refused", f"the launch ended with exit status {status}: {last}, see {self._log}")

    @property
    def seconds(self) -> float | None:
        result = LaunchedRun(self.run_folder).result if (self.run_folder / "launch.json").is_file() else None
        return result["seconds"] if result else None

    def clear(self) -> None:
        """Delete the messages of the ended process; the run folder has what matters."""
        self._messages.unlink(missing_ok=True)

    def _start(self, words: Sequence[str]) -> None:
        argv, environment = own_process(words)
        self._messages.parent.mkdir(parents=True, exist_ok=True)
        self._offset, self._error = 0, ""
        with self._messages.open("wb") as lock, self._messages.open("ab") as out, self._log.open("ab") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._processes.append(_popen(argv, environment, out, log, self._definition.cwd, (lock.fileno(),)))


def _popen(
    argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], log: IO[bytes], cwd: str,
    kept: Sequence[int] = (),
) -> subprocess.Popen[bytes]:  # fmt: skip
    # A session of its own: a Ctrl-C or the end of the terminal does not reach it.
    return subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log, pass_fds=kept, start_new_session=True,
        cwd=cwd if os.path.isdir(cwd) else None,
    )  # fmt: skip
