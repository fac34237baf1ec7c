"""``gnnfleet report --watch``: serves the report of a running run over HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import click

from launcher.errors import FleetError, UsageError
from launcher.manage.collect_run import collect_run
from launcher.manage.node_views import OpenRun
from launcher.report.html.page import ReportPage
from launcher.report.html.record import read_record
from launcher.report.html.render import figure, render, render_main
from launcher.report.html.sections import report_page
from launcher.report.run_folder import read_result
from launcher.report.verdict import known_without_nodes
from launcher.text import say

_HOST = "127.0.0.1"

_EVERY = 3.0  # seconds between updates from the nodes


@dataclass(frozen=True)
class RenderedReport:
    """One rendering of a report: the page, a digest of its content, and JSON that updates pages already open."""

    page: ReportPage
    version: str  #: digest of the content
    news: bytes  #: JSON with the new content for a page that is open

    @classmethod
    def of(cls, page: ReportPage) -> RenderedReport:
        main = render_main(page)
        values = {"title": f"{page.title}: {page.state}", "main": main, "figures": [figure(one) for one in page.charts]}
        version = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
        return cls(page, version, json.dumps({"version": version, **values}).encode())


class ReportServer(ThreadingHTTPServer):
    """HTTP server of one report. Its URL has a secret part, as other users can connect to the port."""

    daemon_threads = True

    def __init__(self, shown: RenderedReport, port: int = 0):
        self.shown, self.secret = shown, secrets.token_urlsafe(12)
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"port {port} of this machine cannot be used: {error.strerror}; leave out --port"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_address[1]}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        shown, top = self.server.shown, f"/{self.server.secret}/"
        if self.headers.get("Host") != f"{_HOST}:{self.server.server_address[1]}":  # prevents DNS rebinding
            self.send_error(HTTPStatus.FORBIDDEN)
        elif url.path == top:
            self._send("text/html; charset=utf-8", render(shown.page, live="news").encode())
        elif url.path == f"{top}news":
            same = parse_qs(url.query).get("known") == [shown.version]
            self._send("application/json", b"" if same else shown.news, 204 if same else 200)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, body: bytes, status: int = 200) -> None:
        with suppress(ConnectionError):  # the page was closed
            self.send_response(status)
            self.send_header("Cache-Control", "no-store")
            if status == 200:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def watch_report(run: OpenRun, folder: Path, *, port: int | None = None, runs_dirs: Sequence[Path] = ()) -> None:
    """Serve the report of the run until Ctrl-C.

    The run's files are collected at intervals until the run ends. ``port``: TCP port to listen on; None: any
    free port.
    """
    over, idle = (True, 0.0) if known_without_nodes(run.found) else _update(run, folder, 0.0)
    server = ReportServer(_rendered(folder, runs_dirs, idle), port or 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    click.echo(f"report of {run.found.run_id}: {server.url}")
    say("the run has ended; " * over + "Ctrl-C ends the report, not the run")
    pause = threading.Event()
    try:
        while not pause.wait(_EVERY):
            if not over:
                over, idle = _update(run, folder, idle)
                server.shown = _rendered(folder, runs_dirs, idle)
                if over:
                    say("the run has ended; the report is served until Ctrl-C")
    except KeyboardInterrupt:
        click.echo(err=True)
    finally:
        server.shutdown()
        server.server_close()


def _update(run: OpenRun, folder: Path, idle: float) -> tuple[bool, float]:
    """Collect the run's files, unless its launcher has already written the result.

    Returns whether the run has ended, and for how many seconds no rank has made progress; if the nodes cannot be
    reached, as long as at the last call (``idle``).
    """
    if read_result(folder) is not None:
        return True, 0.0
    try:
        collected = collect_run(run, folder)
    except FleetError as error:
        say(str(error), "yellow")
        return False, idle
    return collected.report is not None, collected.idle


def _rendered(folder: Path, runs_dirs: Sequence[Path], idle: float) -> RenderedReport:
    page = report_page(read_record(folder, runs_dirs=runs_dirs, idle=idle))
    return RenderedReport.of(page)
