"""Tests of calling node programs over a transport, directly or through the agent."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.command import Command
from launcher.errors import CommandTimeout, NodeCallError
from launcher.node.programs.agent import MARKER
from launcher.transport import process, rpc
from launcher.transport.local import LocalTransport
from launcher.transport.rpc import NodeAgent, bundle, call
from waiting import stretched

HERE = Command((sys.executable,))
ECHO = "def main(request):\n    print('noise')\n    return {'got': request}"
COUNTER = """
from launcher.node import helper
from launcher.node.helper import twice
def main(request):
    helper.calls += 1
    return [twice(request["n"]), helper.calls]
def leave():
    open(helper.file, "w").close()
"""
HELPER = "calls = 0\nfile = {file!r}\ndef twice(n): return 2 * n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "programs"
    folder.mkdir()
    shutil.copy(Path(rpc.__file__).parents[1] / "node/programs/agent.py", folder)
    monkeypatch.setattr(rpc, "_NODE", tmp_path)
    rpc.program_source.cache_clear()
    bundle.cache_clear()
    yield folder
    rpc.program_source.cache_clear()
    bundle.cache_clear()


def agent(python: Command = HERE) -> NodeAgent:
    return NodeAgent(LocalTransport(4), python)


# -- the agent -----------------------------------------------------------


def test_an_agent_keeps_its_programs_between_calls(programs: Path) -> None:
    left = programs / "left"
    (programs / "counter.py").write_text(COUNTER)
    (programs.parent / "helper.py").write_text(HELPER.format(file=str(left)))
    with agent() as node:
        assert node.call("counter", {"n": 3}, 10) == [6, 1]
        (programs / "counter.py").unlink()  # the source is sent once
        assert node.call("counter", {"n": 21}, 10) == [42, 2]
        assert not left.exists()
    assert left.exists()


def test_output_of_profiles_and_programs_is_ignored(programs: Path) -> None:
    (programs / "echo.py").write_text(ECHO)
    setup = ("echo welcome to $HOSTNAME", "echo motd >&2")
    with agent(Command((sys.executable,), setup=setup)) as node:
        assert node.call("echo", {"x": "ä\n"}, 10) == {"got": {"x": "ä\n"}}
        assert node.call("echo", {}, 10) == {"got": {}}


def test_a_program_that_raises_is_named_and_the_agent_continues(programs: Path) -> None:
    (programs / "bad.py").write_text("def main(request):\n    return 1 / request['n']")
    with agent() as node:
        message = r"(?s)^node4 \(local\): gnnfleet's program bad failed in .*python.*:.*ZeroDivisionError"
        with pytest.raises(NodeCallError, match=message):
            node.call("bad", {"n": 0}, 10)
        assert node.call("bad", {"n": 2}, 10) == 0.5


def test_an_agent_that_dies_shows_its_stderr(programs: Path) -> None:
    (programs / "dies.py").write_text("import os\ndef main(request):\n    os.write(2, b'fatal\\n')\n    os._exit(9)")
    with agent() as node, pytest.raises(NodeCallError, match=r"(?s)ended with status 9:\n    fatal"):
        node.call("dies", {}, 10)


def test_an_agent_that_hangs_times_out(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_WAIT", 0.1)
    (programs / "hangs.py").write_text("import time\ndef main(request): time.sleep(60)")
    begun = time.monotonic()
    with agent() as node, pytest.raises(CommandTimeout, match="did not answer within"):
        node.call("hangs", {}, 0.5)
    assert time.monotonic() - begun < stretched(5)


def test_an_answer_that_comes_too_late_is_not_that_of_the_next_call(programs: Path) -> None:
    (programs / "slow.py").write_text("import time\ndef main(request):\n    time.sleep(request)\n    return request")
    with agent() as node:
        assert node.call("slow", 0, 30) == 0  # type: ignore[arg-type]
        with pytest.raises(CommandTimeout):
            node.call("slow", 0.6, 0.1)  # type: ignore[arg-type]
        assert node.call("slow", 0, 30) == 0  # type: ignore[arg-type]
        assert abs(node.clock_offset(30)) < stretched(1)


def test_an_agent_without_python_is_an_error(programs: Path) -> None:
    for python, says in (("/no/python", r"cannot run /no/python .* – set `python`, `venv` or"), ("false", "status 1")):
        with agent(Command((python,))) as node, pytest.raises(NodeCallError, match=says):
            node.call("agent", {}, 10)


@pytest.mark.parametrize(
    "answer",
    ["", "{", "[1]", "{'reply': 1}", "{'times': [1]}", "{'times': ['a', 'b']}", "{'error': 5, 'times': [1, 2]}"]
    + ["(" * 10_000, "-" * 10_000 + "1", "{'times': [1e999, 0]}", "__import__('os')", "{[]: 1}"],
)
def test_an_invalid_reply_is_an_error_of_that_node(answer: str) -> None:
    # The launcher parses replies of the agent as data and never runs them; an invalid reply raises a NodeCallError.
    program = f"import sys\nfor _ in sys.stdin: print({MARKER + answer!r}, flush=True)"
    hostile = Command((sys.executable, "-c", program, "--"))
    with NodeAgent(LocalTransport(4), hostile) as node:
        for ask in (lambda: node.call("agent", {}, 10), lambda: node.clock_offset(10)):
            with pytest.raises(NodeCallError, match="invalid reply from"):
                ask()


def test_clock_offset_is_exact_to_milliseconds() -> None:
    with agent() as node:
        assert abs(node.clock_offset(10)) < 0.5


def test_a_bundle_contains_the_imports_of_the_program() -> None:
    assert set(bundle("probe")) >= {"programs.probe", "programs.machine", "leases"}
    assert set(bundle("agent")) == {"programs.agent"}


# -- one call ------------------------------------------------------------


def test_one_call_is_an_agent_that_ends(programs: Path) -> None:
    (programs / "echo.py").write_text(f"{ECHO}\ndef leave(): open({str(programs / 'left')!r}, 'w').close()")
    python = Command((sys.executable,), setup=("echo welcome to $HOSTNAME",))
    assert call(LocalTransport(4), python, "echo", {"x": ("ä", 1)}, 30) == {"got": {"x": ["ä", 1]}}
    assert (programs / "left").exists()


# -- old interpreters ----------------------------------------------------


def find_python(usable: Callable[[tuple[int, int]], bool]) -> Command | None:
    """Return a python3 of this machine for which ``usable((major, minor))`` is true, or None."""
    for minor in range(6, 14):
        path = shutil.which(f"python3.{minor}")
        if usable((3, minor)) and path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return Command((path,))
    return None


def test_the_programs_run_on_the_oldest_python_supported() -> None:
    python = find_python(lambda version: (3, 8) <= version < (3, 10))
    if python is None:
        pytest.skip("no python3.8 or 3.9 here")
    request = dict.fromkeys(("address", "peer", "manifest", "run_dir", "session"), "")
    with agent(python) as node:
        assert node.call("probe", {**request, "workdir": "/", "ports": []}, 30)["versions"]["python"].startswith("3.")
