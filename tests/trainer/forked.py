"""Forks processes from a server that has already imported torch and the trainer, to save seconds."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from waiting import DEADLINE

REPOSITORY = Path(__file__).resolve().parents[2]
_PRELOADED = ["preloaded"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


class Forked:
    """A forked process with methods of ``subprocess.Popen``. Its stdout and stderr go to one file.

    ``env`` is its whole environment. Torch computes with one thread. Tests of imports need a fresh interpreter instead.
    """

    def __init__(self, work: Callable[..., None], args: Sequence[Any], env: Mapping[str, str], cwd: Path = REPOSITORY):
        self._file = tempfile.TemporaryFile()  # has no name, so that it is never left behind
        self._output = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        arguments = (work, tuple(args), dict(env), cwd, self._output)
        self._process = _context.Process(target=_forked_main, args=arguments, daemon=True)
        _start_server()
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while the process runs, or the negative number of the signal that killed it."""
        return self._process.exitcode

    @property
    def output(self) -> str:
        return Path(self._output).read_text()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        self._process.kill()

    def abort(self, timeout: float = DEADLINE) -> None:
        """Kill the process after it has written the stacks of its threads to its output."""
        self.send_signal(signal.SIGABRT)
        self._process.join(timeout)
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float = DEADLINE) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(["python"], timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = DEADLINE) -> tuple[str, None]:
        self.wait(timeout)
        return self.output, None


def fork(words: Sequence[str], env: Mapping[str, str], cwd: Path = REPOSITORY) -> Forked:
    """Start what ``python *words`` would run: ``-c CODE``, ``-m MODULE`` or a script."""
    return Forked(_run, (list(words),), env, cwd)


def _start_server() -> None:
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ |= {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _forked_main(work: Callable[..., None], args: tuple[Any, ...], env: dict[str, str], cwd: Path, output: str) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    faulthandler.enable()
    assert "preloaded" in sys.modules, "the server that forks could not import it"
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    import torch

    torch.set_num_threads(1)
    work(*args)


def _run(words: list[str]) -> None:
    first, *rest = words
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
