"""Tests of shell completion: the tests type keys into real shells on a pseudo terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.report.launch_file import LaunchFile

ROOT = Path(__file__).resolve().parents[2]
WAIT = 60.0
STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source completion.sh; bind 'set enable-bracketed-paste off'"),
    "zsh": (
        ["zsh", "-f", "-i"],
        "unsetopt zle_bracketed_paste; autoload -U compinit; compinit -u -D; source completion.sh",
    ),
    "fish": (["fish", "--no-config", "-i"], "source completion.sh"),
}
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in STARTS
]


#: A stub of the program ``gnnfleet``. It answers completion requests like gnnfleet, and otherwise prints its arguments.
PROGRAM = """\
#!/bin/sh
[ -z "$_GNNFLEET_COMPLETE" ] && echo "<$*>" && exit
exec {python} -c "from launcher.cli.main import main; main()" "$@"
"""
TYPED = {
    "gnnfleet sto": "stop",
    "gnnfleet reh": "rehearse",
    "gnnfleet export --to ku": "export --to kubernetes",
    "gnnfleet logs toy-a": "logs toy-alpha",
    "gnnfleet launch --conf": "launch --config",
    "gnnfleet -c cluster.yml --nam": "-c cluster.yml --name",
    "gnnfleet -c clus": "-c cluster.yml",
    "gnnfleet check -c cluster.yml --exclude mem1,g": "check -c cluster.yml --exclude mem1,gpu7.lab",
    "gnnfleet plan --set train.epo": "plan --set train.epochs=",
    "gnnfleet -c cluster.yml -- python train_m": "-c cluster.yml -- python train_mine.py",
}


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gnnfleet").write_text(PROGRAM.format(python=sys.executable))
    (tmp_path / "bin/gnnfleet").chmod(0o755)
    (tmp_path / "cluster.yml").write_text("nodes: [mem1, gpu7.lab]\ndata: {dataset: synthetic}\n")
    (tmp_path / "train_mine.py").touch()
    for run_id in ("toy-alpha", "toy-beta"):
        LaunchFile.mine(run_id, "toy", config="cluster.yml").write(tmp_path / "runs" / run_id)
    return tmp_path


class Terminal:
    def __init__(self, shell: str, folder: Path):
        argv, begin = STARTS[shell]
        self.master, slave = pty.openpty()
        env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
        env |= {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *argv], cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.type(f"{begin}; echo re''ady\r")
        self.await_text("ready")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def completed(self, typed: str) -> str:
        """Type ``typed``, Tab and Enter; return the arguments that ``gnnfleet`` then gets."""
        self.type(f"{typed}\t\r")
        return self.await_text("<([^<>]*)>").strip()

    def await_text(self, pattern: str) -> str:
        read, end = "", time.monotonic() + WAIT
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.2)[0]:
                read += os.read(self.master, 65536).decode(errors="replace")
            found = re.search(pattern, read)
            if found:
                return found[found.re.groups]
        raise AssertionError(f"no {pattern!r} in {read!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    (folder / "completion.sh").write_text(capsys.readouterr().out)
    terminal = Terminal(shell, folder)
    try:
        assert {typed: terminal.completed(typed) for typed in TYPED} == TYPED
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["compare", "toy-alpha", ""], {"toy-beta"}),
        (["partition", ""], {"make", "convert", "repartition", "verify", "inspect", "tables", "push", "fetch"}),
        (["-c", "damaged.yml", "--include", ""], set()),
        (["completion", ""], {"bash", "zsh", "fish"}),
    ],
    ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value),
)
def test_the_offered_completions(
    typed: list[str],
    offered: set[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "damaged.yml").write_text("nodes: [")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("_GNNFLEET_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", shlex.join(["gnnfleet", *filter(None, typed)]))
    monkeypatch.setenv("COMP_CWORD", str(len(typed)))
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 0
    assert {line.partition(",")[2] for line in capsys.readouterr().out.splitlines() if line} == offered


def test_an_unknown_shell_is_an_error_that_names_the_supported_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run(["completion"]) == 2
    assert "no completion for shell `tcsh`; name a shell: gnnfleet completion bash|zsh|fish" in capsys.readouterr().err
