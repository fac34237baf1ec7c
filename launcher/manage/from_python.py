"""Launches and follows runs from Python: ``gf.launch`` and ``gf.LaunchedRun``.

Each call is a command of ``gnnfleet`` in a process of its own, so that a run outlives the caller, and several may be
launched at once from threads.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import FleetError
from launcher.report.launch_file import BEFORE_NODES
from launcher.report.metrics import metrics_files, read_metrics
from launcher.report.run_folder import known_here, never_ran, read_folder, read_result
from launcher.run.config_of_options import overrides_of, read_config
from launcher.run.options import LaunchOptions, choose_run_id

_LINES = 50  # last lines of a command that are kept for its error


class RunFailed(FleetError):
    """A run has failed, or was stopped by somebody else. ``str()`` is its first cause.

    Attributes:
        run: The run.
        result: Content of its result.json.
    """

    def __init__(self, message: str, run: LaunchedRun, result: Mapping[str, Any]):
        super().__init__(message)
        self.run, self.result = run, result


def launch(
    config: str | Path,
    *,
    set: Mapping[str, Any] | None = None,
    command: str | Sequence[str] = (),
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    nodes: int | str | None = None,
    wait: bool | str = False,
    run_id: str | None = None,
    quiet: bool = False,
) -> LaunchedRun:
    """Launch a run and return once its first step has trained, or once it waits in line, as ``gnnfleet launch
    --detach``.

    The run belongs to its hosts: it goes on when this process ends, and ``gf.LaunchedRun(run_id)`` finds it again.

    Args:
        config: The cluster.yml.
        set: Values of config keys, such as ``{"train.lr": 0.01}``.
        command: Your own command instead of the bundled trainer, such as ``"python train.py"``, or its words.
        include, exclude: Hosts and devices, as of the options ``--include`` and ``--exclude``.
        nodes: How many of the hosts to use, ``2`` or ``"2-4"``: the first that are free, as of ``--nodes-needed``.
        wait: Wait in line for hosts and devices in use, as ``--wait``; ``"2h"``: at most so long.
        run_id: Id of the run; default: from name and time.
        quiet: Print no lines of the launch to stderr.

    Raises:
        FleetError: The config is invalid, or preflight refused the run; nothing was started.
        RunFailed: The run failed before its first step.

    Example:
        ```python notest
        run = gf.launch("cluster.yml", set={"train.lr": 0.003})
        print(run.wait()["metrics"]["test_accuracy"])
        ```
    """
    command = shlex.split(command) if isinstance(command, str) else command
    include, exclude = ((hosts,) if isinstance(hosts, str) else tuple(hosts) for hosts in (include, exclude))

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)  # tolist: numbers of numpy and torch

    # ``ensure_ascii`` would write surrogate pairs, which YAML does not have.
    sets = [f"{key}={json.dumps(value, default=plain, ensure_ascii=False)}" for key, value in (set or {}).items()]
    options = LaunchOptions(Path(config), overrides_of({}, sets), include, exclude)
    run_id = choose_run_id(options.choose(read_config(options)), run_id)
    words = ["launch", "--config", str(config), "--run-id", run_id, "--detach", "--json"]
    words += ["--nodes-needed", str(nodes)] if nodes is not None else []
    words += ["--wait", *([wait] if isinstance(wait, str) else [])] if wait else []
    for option, values in (("--set", sets), ("--include", include), ("--exclude", exclude)):
        words += [word for value in values for word in (option, value)]
    status, _, said = _gnnfleet([*words, *(("--", *command) if command else ())], quiet=quiet)
    folder = known_here(run_id, ())
    run = LaunchedRun(run_id) if folder and read_folder(folder).launch else None
    if run is None or (status and not run.started):
        raise FleetError(said)
    if run.result is not None and run.result["state"] in ("failed", "stopped"):
        raise RunFailed(run.cause or said, run, run.result)
    return run


class LaunchedRun:
    """A run, found by its id or folder: also one that another program has launched.

    Attributes:
        run_id: Its id.
        folder: Its run folder on this machine.
    """

    def __init__(self, run: str | Path):
        folder = Path(run) if (Path(run) / "launch.json").is_file() else known_here(str(run), (Path("runs"),))
        if folder is None:
            raise FleetError(f"no run {run} is known on this machine; `gnnfleet runs` lists those that are")
        self.run_id, self.folder = read_folder(folder).run_id, folder.absolute()
        self._stopped = False

    def __repr__(self) -> str:
        return f"LaunchedRun({self.run_id!r})"

    @property
    def started(self) -> bool:
        """Whether processes of the run have been started on its hosts."""
        launch = read_folder(self.folder).launch
        return launch is not None and launch.stage not in BEFORE_NODES and not never_ran(self.folder)

    @property
    def result(self) -> dict[str, Any] | None:
        """Content of result.json: ``state`` (done, failed or stopped), ``metrics``, ``first_failure``, …

        None until the run has ended and ``wait`` or ``gnnfleet follow`` has collected its files.
        """
        found = read_result(self.folder)
        return found if found is not None and found["state"] != "detached" else None

    @property
    def cause(self) -> str:
        """Why the run failed, in one sentence; '' if it did not."""
        result = self.result or {}
        first = result.get("first_failure")
        return str(first["sentence"]) if first else "; ".join(result.get("notes") or ())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each epoch: ``epoch``, ``loss``, ``seconds`` and metrics by split (``val_accuracy``).

        Of a run that has not ended, the metrics so far are copied from its hosts first.
        """
        if self.result is None:
            _gnnfleet(["collect", str(self.folder), "--json"])
        found = read_metrics(metrics_files(self.folder))
        rows: dict[int, dict[str, Any]] = {}
        for line in found.epochs():
            about = {name: line[name] for name in ("epoch", "loss", "seconds") if name in line}
            rows.setdefault(line["epoch"], about)
        for line in found.of_kind("eval"):
            if (row := rows.get(line.get("epoch", 0))) is not None and "split" in line:
                numbers = ((name, value) for name, value in line.items() if isinstance(value, float) and name != "t")
                row |= {f"{line['split']}_{name}": value for name, value in numbers}
        return [rows[epoch] for epoch in sorted(rows)]

    def state(self) -> str:
        """Return the state of the run, asking its hosts: ``waiting``, ``running``, ``done``, ``failed``, …"""
        result = self.result
        if result is not None:
            return str(result["state"])
        _, text, said = _gnnfleet(["status", str(self.folder), "--json"])
        if not text:
            raise FleetError(said)
        return str(json.loads(text)["state"])

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Follow the run to its end, collect its files, and return the content of its result.json.

        Args:
            timeout: Seconds; None: as long as it takes.

        Raises:
            RunFailed: It failed, or was stopped, but not by ``stop`` of this object.
            TimeoutError: It still runs after ``timeout`` seconds.
            FleetError: Its hosts cannot be reached; it may still run.
        """
        if self.result is None:
            _, _, said = _gnnfleet(["follow", str(self.folder), "--json"], timeout=timeout)
            if self.result is None:
                raise FleetError(said)
        result = self.result
        assert result is not None
        if result["state"] == "failed" or (result["state"] == "stopped" and not self._stopped):
            raise RunFailed(self.cause or f"the run was stopped by {result.get('stopped_by')}", self, result)
        return result

    def stop(self) -> None:
        """Stop the run on all its hosts and collect its files. Raises FleetError if something is left on a host."""
        self._stopped = True
        status, _, said = _gnnfleet(["stop", str(self.folder), "--json"])
        if status:
            raise FleetError(said)


def own_process(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return argv and environment of a process that runs a command of ``gnnfleet``, in any folder."""
    here = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    return [sys.executable, str(here / "launcher/__main__.py"), *words], {**os.environ, "PYTHONPATH": path}


def _gnnfleet(words: Sequence[str], *, quiet: bool = True, timeout: float | None = None) -> tuple[int, str, str]:
    """Run a command of ``gnnfleet``; return its exit status, its output, and its error message.

    It runs in a session of its own, without the Ctrl-C of a terminal. After ``timeout`` seconds, or when this thread is
    interrupted, it gets SIGTERM, by which ``follow`` leaves a run alone; then TimeoutError is raised.
    """
    argv, environment = own_process(words)
    expired, said = threading.Event(), list[str]()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        ) as process,
    ):  # fmt: skip

        def expire() -> None:
            expired.set()
            process.terminate()

        timer = threading.Timer(timeout or 0, expire)
        try:
            if timeout is not None:
                timer.start()
            for line in process.stderr or ():
                said = [*said[-_LINES:], line.rstrip()]
                if not quiet:
                    print(line, end="", file=sys.stderr, flush=True)
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            timer.cancel()
        if expired.is_set():
            raise TimeoutError(f"it still runs after {timeout:g} s")
        out.seek(0)
        text = out.read()
    first = next((i for i in range(len(said)) if said[i].startswith("error: ")), 0)
    return status, text, "\n".join(said[first:]).removeprefix("error: ")
