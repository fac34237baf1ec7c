"""Node program: downloads files in the background, and resumes interrupted downloads. Standard library only.

``main(request)`` answers one request, by its "op":

- ``reach``: {"reached": [whether this host can download from each of ``urls``]}
- ``fetch``: starts to download the ``wheels`` ({"file", "url", "sha256"}) to ``folder``
- ``fetched``: waits at most ``seconds`` until these downloads have ended; {"bytes": received so far, "total": bytes of
  the downloads that have begun, "done": whether all have ended, "error": text or ''}
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from launcher.node.programs.files import sha256_of

_REACH_SECONDS = 5.0  # timeout of a request that tests whether a server can be reached

_STALL_SECONDS = 60.0  # a download that receives nothing for so long has failed

_AT_ONCE = 4  # downloads at a time

_CHUNK = 1 << 18  # bytes


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; the docstring of the module lists them."""
    operation = request["op"]
    if operation == "reach":
        with ThreadPoolExecutor(max_workers=8) as pool:
            return {"reached": list(pool.map(reach, request["urls"]))}
    if operation == "fetch":
        DOWNLOADS.start(os.path.expanduser(request["folder"]), request["wheels"])
        return {}
    return DOWNLOADS.state(request["seconds"])


def reach(url: str) -> bool:
    """Whether a HEAD request for ``url`` succeeds."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_REACH_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # URLError and SSL errors are OSErrors
        return False


class Downloads:
    """Downloads files in background threads and resumes interrupted downloads. A complete file has its final name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[dict[str, Any]] = []
        self.threads: list[threading.Thread] = []
        self.bytes = self.total = 0
        self.error = ""

    def start(self, folder: str, wheels: list[dict[str, Any]]) -> None:
        """Begin to download ``wheels`` to ``folder``."""
        os.makedirs(folder, exist_ok=True)
        self.bytes, self.total, self.error = 0, 0, ""
        self.waiting = [dict(one, path=os.path.join(folder, one["file"])) for one in reversed(wheels)]
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(_AT_ONCE)]
        for thread in self.threads:
            thread.start()

    def state(self, seconds: float) -> dict[str, Any]:
        """Wait at most ``seconds`` until all downloads have ended; return their progress."""
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = not any(thread.is_alive() for thread in self.threads)
        return {"bytes": self.bytes, "total": self.total, "done": done, "error": self.error}

    def work(self) -> None:
        while not self.error:
            with self.lock:
                if not self.waiting:
                    return
                one = self.waiting.pop()
            try:
                self.download(one)
            except (OSError, ValueError) as error:
                reason = error.reason if isinstance(error, URLError) else error
                self.error = "%s: %s" % (one["url"], reason)

    def download(self, one: dict[str, Any]) -> None:
        """Download a wheel, compare its digest and give it its final name. Raises OSError and ValueError."""
        path, part = one["path"], one["path"] + ".part"
        if os.path.exists(path) and sha256_of(path) == one["sha256"]:
            return
        have = os.path.getsize(part) if os.path.exists(part) else 0
        headers = {"Range": "bytes=%d-" % have} if have else {}
        try:
            answer = urlopen(Request(one["url"], headers=headers), timeout=_STALL_SECONDS)
        except URLError as error:
            if getattr(error, "code", 0) != 416:  # 416: the file is complete, or longer than the original
                raise
            os.unlink(part)
            answer = urlopen(Request(one["url"]), timeout=_STALL_SECONDS)
        with answer, open(part, "ab" if answer.status == 206 else "wb") as out:
            expected = int(answer.headers.get("Content-Length") or 0)
            self.count(total=expected)
            while True:
                data = answer.read(_CHUNK)
                if not data:
                    break
                out.write(data)
                expected -= len(data)
                self.count(len(data))
        if expected > 0:
            raise ValueError("the connection was closed %d bytes before the end" % expected)
        if sha256_of(part) != one["sha256"]:
            os.unlink(part)
            raise ValueError("the downloaded file does not have the expected SHA-256 digest")
        os.replace(part, path)

    def count(self, received: int = 0, total: int = 0) -> None:
        with self.lock:
            self.bytes += received
            self.total += total


DOWNLOADS = Downloads()
