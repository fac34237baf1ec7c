"""Runs tests in processes that are forked once all tests have been collected: ``pytest --workers N``.

Workers of pytest-xdist are new interpreters, each of which loads torch and collects 7,000 tests: 10 s of work.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import pytest

_fork = multiprocessing.get_context("fork")


@dataclass
class _Worker:
    process: Any
    channel: Connection  #: sends the index of a test to the worker, which sends its reports and then None
    rest: deque[int] = field(default_factory=deque)  #: tests left of the file that the worker is at
    running: int | None = None  #: the test that it runs
    ending: bool = False  #: it has been told that no test is left


def run_tests(session: pytest.Session, workers: int) -> None:
    """Run the collected tests in ``workers`` processes and report them as pytest does.

    A file stays with one worker, which makes what its tests share once. No other test runs beside one that is marked
    ``quiet``. A worker that dies fails the test that it ran; another one goes on with the file.
    """
    config, items = session.config, session.items
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reporter.showfspath = False  # the results of several files alternate
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # all workers have theirs below it
    files = deque(deque(file) for _, file in groupby(range(len(items)), lambda k: items[k].path))
    quiet = {k for k, item in enumerate(items) if item.get_closest_marker("quiet")}
    numbers = iter(range(len(items)))
    at_work: list[_Worker] = []
    try:
        while files or at_work:
            while files and len(at_work) < workers:
                ours, theirs = _fork.Pipe()
                others = [ours, *(worker.channel for worker in at_work)]  # else a worker would not see our end
                process = _fork.Process(target=_work, args=(session, next(numbers), theirs, others))
                process.start()
                theirs.close()
                at_work.append(_Worker(process, ours, files.popleft()))
            _hand_out(at_work, files, quiet)
            for ready in wait([worker.channel for worker in at_work]):
                (worker,) = (worker for worker in at_work if worker.channel is ready)
                try:
                    _receive(session, worker, worker.channel.recv())
                except (EOFError, ConnectionError):
                    at_work.remove(worker)
                    worker.process.join()
                    if worker.running is not None:
                        text = f"the worker that ran this test died: exit status {worker.process.exitcode}"
                        _report_failure(items[worker.running], text, "call")
                    if worker.rest:
                        files.appendleft(worker.rest)
            if session.shouldfail or session.shouldstop:
                files.clear()
                for worker in at_work:
                    worker.rest.clear()
    finally:
        for worker in at_work:
            worker.channel.close()  # the worker ends after the test that it runs
        for worker in at_work:
            worker.process.join()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _hand_out(at_work: list[_Worker], files: deque[deque[int]], quiet: set[int]) -> None:
    """Send the next test to each idle worker. A quiet test waits until no other runs, and keeps others waiting."""
    idle = [worker for worker in at_work if worker.running is None and not worker.ending]
    for worker in idle:
        if not worker.rest and files:
            worker.rest = files.popleft()
    for worker in sorted(idle, key=lambda worker: not (worker.rest and worker.rest[0] in quiet)):
        running = {worker.running for worker in at_work} - {None}
        if not worker.rest:
            worker.ending = True
            worker.channel.send(None)
        elif running & quiet or (running and worker.rest[0] in quiet):
            return
        else:
            worker.running = worker.rest.popleft()
            worker.channel.send((worker.running, worker.rest[0] if worker.rest else None))


def _receive(session: pytest.Session, worker: _Worker, message: tuple[str, Any]) -> None:
    hook, (kind, value) = session.config.hook, message
    if kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=value)
        hook.pytest_runtest_logreport(report=report)
    elif kind == "warning":
        hook.pytest_warning_recorded.call_historic(kwargs=value)
    elif kind == "stop":
        session.shouldstop = value
    else:
        assert worker.running is not None
        item = session.items[worker.running]
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        worker.running = None
        session.shouldfail = session.shouldfail or value  # pytest-timeout's limit for all tests


def _report_failure(item: pytest.Item, text: str, when: Literal["call", "teardown"]) -> None:
    item.ihook.pytest_runtest_logreport(report=pytest.TestReport(item.nodeid, item.location, {}, "failed", text, when))


class _Sender:
    """Sends the reports and warnings of a worker."""

    def __init__(self, config: pytest.Config, channel: Connection):
        self._config, self._channel = config, channel

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._channel.send(("report", hook.pytest_report_to_serializable(config=self._config, report=report)))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        shown = warnings.WarningMessage(
            str(warning_message.message), warning_message.category, warning_message.filename, warning_message.lineno
        )
        values = {"warning_message": shown, "when": when, "nodeid": nodeid, "location": location}
        self._channel.send(("warning", values))


def _work(session: pytest.Session, number: int, channel: Connection, others: list[Connection]) -> None:
    for other in others:
        other.close()
    config = session.config
    os.environ["PYTEST_WORKER"] = str(number)
    folder = config._tmp_path_factory.getbasetemp() / f"worker{number}"  # type: ignore[attr-defined]
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's
    capture.start_global_capturing()
    plugins.register(_Sender(config, channel))
    try:
        while work := channel.recv():
            index, following = work
            item = session.items[index]
            # after the last test of a file, what is made once per session stays
            nextitem = session if following is None else session.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            channel.send(("end", session.shouldfail))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass
    except pytest.exit.Exception as ending:
        channel.send(("stop", str(ending)))
    try:
        plugins.getplugin("runner").pytest_sessionfinish(session)
    except Exception as error:
        _report_failure(item, f"{error!r}\n{traceback.format_exc()}", "teardown")
