"""Node program: runs other node programs on request, in one Python process. Python 3.8, standard library only.

The agent starts on all nodes at once and must start fast. It does not import typing, json, socket or subprocess, as
importing them takes longer than starting Python. So messages are Python literals instead of JSON, and types from
``typing`` occur only in annotations, which are not evaluated.

Each line of stdin is a request ``{"program": name, "sources": {name: source}, "request": …}``. The agent makes
``sources`` importable as ``launcher.node.<name>``, and calls ``main(request)`` of ``launcher.node.programs.<program>``.
It answers with a line of stdout: ``MARKER{"reply": …, "times": [received, sent]}``, times in seconds since the epoch.
After an exception, the line has ``"error": traceback`` in place of ``"reply"``. If ``program`` is empty, the agent
calls nothing, and the line has only ``"times"``. Modules stay loaded between requests. When stdin closes, the agent
calls ``leave()`` of each module that defines it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from importlib import import_module

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, BinaryIO, Optional

MARKER = "gnnfleet-reply:"  # distinguishes answers from output of login profiles and setup commands

PACKAGE = "launcher.node"

PROGRAMS = PACKAGE + ".programs"


class _SentModules:
    """Import hook for ``sys.meta_path``: imports modules from the source texts that were sent."""

    def __init__(self) -> None:
        self.sources = {}  # type: dict[str, str]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        package = name in ("launcher", PACKAGE, PROGRAMS)
        if package or name[len(PACKAGE) + 1 :] in self.sources:
            return type(sys.__spec__)(name, self, is_package=package)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> Optional[ModuleType]:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = self.sources.get(module.__name__[len(PACKAGE) + 1 :], "")
        exec(compile(source, "<%s>" % module.__name__, "exec"), module.__dict__)


def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until ``lines`` ends, then end the process."""
    gc.disable()  # the process runs for seconds only
    sent = _SentModules()
    sys.meta_path.insert(0, sent)  # type: ignore[arg-type]
    while True:
        line = lines.readline()
        if not line:
            break
        received = time.time()
        request = eval(line.decode())  # safe here: requests contain code to run anyway
        sent.sources.update(request["sources"])
        answer: dict[str, Any] = {}
        if request["program"]:
            try:
                answer["reply"] = import_module("%s.%s" % (PROGRAMS, request["program"])).main(request["request"])
            except Exception:  # the launcher reports it with the node's name
                import traceback

                answer["error"] = traceback.format_exc()
        answer["times"] = [received, time.time()]
        answers.write(("\n%s%s\n" % (MARKER, repr(answer))).encode())
        answers.flush()
    leave()


def leave() -> None:
    """Call ``leave()`` of each loaded program that defines it, then end this process without interpreter shutdown."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE + ".") and hasattr(module, "leave"):
            module.leave()
    os._exit(0)
