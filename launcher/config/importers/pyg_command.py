"""Parses the quoted command of torch_geometric's launch.py: its folder, environment, setup and script."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from dataclasses import dataclass, replace

from launcher.errors import UsageError

#: Examples of torch_geometric.distributed, which the bundled trainer replaces.
_EXAMPLES = {
    "e2e_homo.py", "e2e_hetero.py", "node_ogb_cpu.py", "distributed_cpu.py", "dist_train_sage_for_homo.py",
    "dist_train_sage_for_hetero.py",
}  # fmt: skip

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Remote:
    """The quoted command of torch_geometric's launch.py, parsed."""

    text: str  #: the whole command
    folder: str = ""  #: working folder after `cd`; "": the login folder
    interpreter: tuple[str, str] = ("", "")  #: ("venv" | "conda" | "python", path or name)
    setup: tuple[str, ...] = ()  #: other statements before the script, unchanged
    devices: str = ""  #: value of CUDA_VISIBLE_DEVICES before the script
    words: tuple[str, ...] = ()  #: options of python, the script and its arguments

    @property
    def script(self) -> str:
        return next((word for word in self.words if word.endswith(".py")), "")

    @property
    def is_example(self) -> bool:
        return posixpath.basename(self.script) in _EXAMPLES

    @property
    def own_command(self) -> tuple[str, ...]:
        """The command that runs the user's script; () for examples of PyG, which the bundled trainer replaces."""
        if self.is_example:
            return ()
        # A script that this machine lacks is a path on the nodes.
        on_nodes = self.folder and not os.path.isfile(self.script)
        script = _joined(self.folder, self.script) if on_nodes else self.script
        return ("python", *(script if word == self.script else word for word in self.words))


def parse_remote(command: str) -> Remote:
    """Parse ``'cd …; source …/activate; python script.py'``. Raises UsageError for commands that are not supported."""
    remote = Remote(command)
    pieces = re.findall(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|&&|;|\n|.""", command, re.DOTALL)
    texts = [""]
    for piece in pieces:
        if piece in (";", "&&", "\n"):
            texts.append("")
        else:
            texts[-1] += piece
    statements = [text.strip() for text in texts if text.strip()]
    for place, statement in enumerate(statements):
        lexer = shlex.shlex(statement, posix=True, punctuation_chars="|&<>()")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError as error:
            raise _refused(command, str(error).lower()) from None
        if not words:  # a comment
            continue
        if any(_is_python(word) for word in words):
            if place + 1 < len(statements):
                raise _refused(
                    command, f"`{statements[place + 1]}` follows the script; end the command with the script"
                )
            return _script(remote, words)
        remote = _before(remote, statement, words)
    raise _refused(command, "expected `python script.py` in it")


def _before(remote: Remote, statement: str, words: list[str]) -> Remote:
    """Return ``remote`` updated by one statement before the script: a folder, an environment or a setup line."""
    if words[0] == "cd" and len(words) == 2:
        return replace(remote, folder=_joined(remote.folder, _home(words[1], remote)))
    if words[0] in ("source", ".") and len(words) > 1 and posixpath.basename(words[1]) == "activate":
        if len(words) == 3:
            return replace(remote, interpreter=("conda", words[2]))
        if "/" in words[1]:
            prefix = posixpath.dirname(posixpath.dirname(_joined(remote.folder, _home(words[1], remote))))
            return replace(remote, interpreter=(_manager(prefix), prefix))
    if words[:2] == ["conda", "activate"] and len(words) == 3:
        return replace(remote, interpreter=("conda", words[2]))
    return replace(remote, setup=(*remote.setup, statement))


def _script(remote: Remote, words: list[str]) -> Remote:
    while words and (assigned := _ASSIGNED.fullmatch(words[0])):
        if assigned[1] == "CUDA_VISIBLE_DEVICES":
            remote = replace(remote, devices=assigned[2])
        else:
            remote = replace(remote, setup=(*remote.setup, f"export {assigned[1]}={shlex.quote(assigned[2])}"))
        words = words[1:]
    if not words or not _is_python(words[0]):
        raise _refused(remote.text, f"expected `python script.py`, found `{shlex.join(words)}`")
    if wrong := next((word for word in words if re.fullmatch(r"[|&<>()]+", word)), None):
        raise _refused(remote.text, f"`{wrong}` is not supported; leave it out, as gnnfleet collects the output")
    if len(words) < 2:
        raise _refused(remote.text, "expected `python script.py` in it")
    if wrong := next((word for word in words[1:] if re.search(r"[$`]", word)), None):
        raise _refused(remote.text, f"write `{wrong}` without a variable, as the script is started without a shell")
    python = _home(words[0], remote)
    if "/" in python and not remote.interpreter[0]:
        # ``("conda", prefix)`` if ``path`` is the Python of a conda environment, else ``("python", path)``
        path = _joined(remote.folder, python)
        prefix = posixpath.dirname(posixpath.dirname(path))
        remote = replace(remote, interpreter=("conda", prefix) if _manager(prefix) == "conda" else ("python", path))
    elif not remote.interpreter[0]:
        remote = replace(remote, interpreter=("python", python))
    return replace(remote, words=tuple(words[1:]))


def _manager(prefix: str) -> str:
    return "conda" if "/envs/" in prefix or re.search(r"/(mini|ana)conda3?$", prefix) else "venv"


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", posixpath.basename(word)) is not None


def _joined(folder: str, path: str) -> str:
    if path.startswith(("/", "~")):
        return path.rstrip("/") or "/"
    return posixpath.normpath(posixpath.join(folder or "~", path))


def _home(path: str, remote: Remote) -> str:
    """Replace $HOME by ~. Raises UsageError for other variables."""
    path = re.sub(r"^(\$HOME|\$\{HOME\})(?=/|$)", "~", path)
    if "$" in path or "`" in path:
        raise _refused(remote.text, f"write `{path}` without a variable")
    return path


def _refused(command: str, why: str) -> UsageError:
    return UsageError(f"the quoted command '{command}': {why}")
