"""Node program: a Python that runs other node programs on request. Python 3.8, standard library only.

Everything that is started on all nodes at once is sparing: typing, json, socket and subprocess take longer to
import than Python to start. So lines are Python literals, and annotations alone name types of ``typing``.

A line of stdin is ``{"program": name, "sources": {name: source}, "request": …}``: modules it can import as
``launcher.node.<name>`` from now on, and the program (``launcher.node.programs.<program>``) whose ``main(request)``
gives the reply. The answer is ``MARKER{"reply": …, "times": [received, sent]}`` on a line of stdout, or ``{"error":
traceback}``; without a program, the times alone. Modules stay loaded from call to call. When stdin closes, ``leave()``
of each module that has one is called.
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

MARKER = "gnnfleet-reply:"  # so that output of profiles and setup lines does no harm

PACKAGE = "launcher.node"

PROGRAMS = PACKAGE + ".programs"


class Sent:
    """Finds and loads the modules that were sent; a meta path finder."""

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
    """Answer line by line until nobody asks any more."""
    gc.disable()  # it lives for seconds
    sent = Sent()
    sys.meta_path.insert(0, sent)  # type: ignore[arg-type]
    while True:
        line = lines.readline()
        if not line:
            break
        received = time.time()
        answer = answer_to(eval(line.decode()), sent)  # who asks could run any other code here as well
        answer["times"] = [received, time.time()]
        answers.write(("\n%s%s\n" % (MARKER, repr(answer))).encode())
        answers.flush()
    leave()


def answer_to(asked: dict[str, Any], sent: Sent) -> dict[str, Any]:
    sent.sources.update(asked["sources"])
    if not asked["program"]:
        return {}  # the times alone
    try:
        return {"reply": import_module("%s.%s" % (PROGRAMS, asked["program"])).main(asked["request"])}
    except Exception:  # told to the launcher, which names the node
        import traceback

        return {"error": traceback.format_exc()}


def leave() -> None:
    """Let the programs tidy up; then end at once, as nothing else is open."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE + ".") and hasattr(module, "leave"):
            module.leave()
    os._exit(0)
