"""Sends a message about a run to a URL or a command (``run.notify``). Python 3.8, standard library only.

The supervisor that speaks for the run starts it as a program, with what ``main`` takes as JSON in the variable
GNNFLEET_NOTICE; it prints why a message did not arrive, and ends with status 1. ``gnnfleet check --notify`` calls
``main``.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

NOTICE = "GNNFLEET_NOTICE"

_WAIT = 10.0  # seconds until an address must have answered

_RUN_FOR = 30.0  # seconds that a command may take

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")

_SECRET = re.compile(r"://[^/@\s]*@")  # user and password

_URL = re.compile(r"https?://\S+", re.IGNORECASE)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would follow one with GET, without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Send a message to each target.

    request: {"targets": [URL or command line], "message": JSON object, "env": more variables, "pauses": [seconds before
    each further attempt]}. Returns {"errors": {number of the target: why the message did not arrive}}.
    """
    env = dict(os.environ, **request["env"])
    env.pop(NOTICE, None)
    body = json.dumps(request["message"]).encode()
    errors = {}
    for number, target in enumerate(request["targets"]):
        for pause in [0.0, *request["pauses"]]:
            time.sleep(pause)
            error, again = _send(target, body, env)
            if not (error and again):
                break
        if error:
            errors[number] = error
    return {"errors": errors}


def label(target: str) -> str:
    """Return a target for messages, without what may be secret: the server of a URL, the program of a command."""
    if _URL.fullmatch(target):
        return urlsplit(_SECRET.sub("://", target)).hostname or "URL"
    variable = _VARIABLE.match(target)
    return variable.group() if variable else (target.split() or [""])[0]


def _send(target: str, body: bytes, env: dict[str, str]) -> tuple[str, bool]:
    """Return why ``body`` did not reach ``target``, '' if it did; and whether another attempt may succeed."""
    if not target.startswith("$") and not _URL.match(target):
        argv = shlex.split(target)
        try:
            ended = subprocess.run(
                argv, input=body, env=env, timeout=_RUN_FOR, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except subprocess.TimeoutExpired:
            return "%s did not end within %d s" % (argv[0], _RUN_FOR), False
        except OSError as error:
            return "%s: %s" % (argv[0], error.strerror), False
        lines = ended.stdout.decode("utf-8", "replace").strip().splitlines()
        words = "%s ended with exit status %d" % (argv[0], ended.returncode)
        return (words + (": %s" % lines[-1] if lines else "") if ended.returncode else ""), False
    names = [match.group(1) or match.group(2) for match in _VARIABLE.finditer(target)]
    unset = [name for name in names if name not in env]
    if unset:
        words = "%s: the variable %s is not set on this host; `env` of the node can set it"
        return words % (label(target), unset[0]), False
    url = _VARIABLE.sub(lambda match: env[match.group(1) or match.group(2)], target)
    if not _URL.fullmatch(url):
        return "%s is no http:// or https:// address" % label(target), False
    name = label(target)
    head = {"Content-Type": "application/json", "User-Agent": "gnnfleet"}
    try:
        post = urllib.request.Request(url, body, head, method="POST")
        with urllib.request.build_opener(_NoRedirect).open(post, timeout=_WAIT):
            return "", False
    except urllib.error.HTTPError as error:
        words, said = "%s answered %d %s" % (name, error.code, error.reason), ""
        with suppress(OSError, http.client.HTTPException):  # the answer breaks off
            said = " ".join(error.read(300).decode("utf-8", "replace").split())
        return words + (": %s" % said if said else ""), error.code >= 500 or error.code == 429
    except OSError as error:  # also URLError
        return "%s: %s" % (name, getattr(error, "reason", error)), True
    except (ValueError, http.client.InvalidURL):  # their texts repeat the address
        return "%s: the address cannot be used; it has no user or password, and may have a port" % name, False
    except http.client.HTTPException as error:
        return "%s: no answer in HTTP (%s)" % (name, type(error).__name__), True


if __name__ == "__main__":
    wrong = main(json.loads(os.environ[NOTICE]))["errors"]
    print("\n".join(wrong.values()))
    sys.exit(1 if wrong else 0)
