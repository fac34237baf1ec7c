"""The user's own files that are sent with a run: the script, files named in its command, a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.plan.model import PlannedFile, copied


@dataclass(frozen=True)
class OwnCommand:
    """The user's command as it runs on every node, and what it needs in its working folder."""

    argv: tuple[str, ...]
    files: tuple[PlannedFile, ...]  #: dest relative to ``files/``
    notes: tuple[str, ...]


def own_command_files(argv: Sequence[str], extra: Sequence[str], cwd: Path) -> OwnCommand:
    """Words of ``argv`` that are files here travel along, and so do the ``extra`` files and folders.

    Files and folders below ``cwd`` keep their relative path, others go by their name; a folder stays as it is inside,
    also where a word of the command is one of its files.
    """
    words: list[str] = []
    notes: list[str] = []
    files: dict[str, Path] = {}
    for word in argv:
        path = cwd / word
        if path.is_file() and "/" not in word and word == argv[0]:
            words.append(word)  # a bare first word is looked up on the node's PATH, as a shell would
        elif path.is_file():
            dest = _inside(path, extra, cwd) or _dest(path, cwd)
            _add(files, dest, path)
            words.append(word if dest == os.path.normpath(word) else dest)
        else:
            words.append(word)
            if path.is_dir():
                notes.append(f"folder `{word}` of your command is not sent; name it in run.files if the nodes need it")
    for dest, path in _walk(extra, cwd):
        _add(files, dest, path)
    _script_is_here(argv, files, cwd)
    planned = tuple(copied(dest, path, mode=_mode(path)) for dest, path in sorted(files.items()))
    return OwnCommand(tuple(words), planned, tuple(notes))


def _script_is_here(argv: Sequence[str], files: Mapping[str, Path], cwd: Path) -> None:
    """A script that is neither sent nor named by an absolute path would only be missed on the nodes."""
    script = argv[1] if len(argv) > 1 and Path(argv[0]).name.startswith("python") else argv[0]
    if (
        script.endswith(".py")
        and not script.startswith(("/", "~"))
        and not {script, _dest(cwd / script, cwd)} & set(files)
    ):
        raise UsageError(
            f"your own command: there is no file `{script}` in {cwd.absolute()}. It would be sent from here; "
            "for one that lies on the nodes already, give its absolute path"
        )


def resume_file(config: ClusterConfig, cwd: Path) -> PlannedFile | None:
    """The checkpoint that train.resume names, by path or by run id; dest relative to the run folder."""
    wanted = config.train.resume
    if wanted is None:
        return None
    of_run = cwd / config.run.runs_dir / wanted / "checkpoints" / "last.pt"
    for path in (cwd / wanted, of_run):
        if path.is_file():
            return copied("resume.pt", path)
    raise UsageError(f"train.resume: there is no file `{wanted}`, and no run of that id with a checkpoint ({of_run})")


def _dest(path: Path, cwd: Path) -> str:
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(cwd))
    return path.name if relative.startswith("..") else Path(relative).as_posix()


def _inside(path: Path, extra: Sequence[str], cwd: Path) -> str:
    """Where a file lies in one of the folders that are sent; '' in none: a script finds what is beside it."""
    real = path.resolve()
    for folder in (Path(name) for name in extra):
        if folder.is_dir() and real.is_relative_to(folder.resolve()):
            return (Path(_dest(folder, cwd)) / real.relative_to(folder.resolve())).as_posix()
    return ""


def _add(files: dict[str, Path], dest: str, path: Path) -> None:
    there = files.setdefault(dest, path)
    if not there.samefile(path):
        raise UsageError(f"{there} and {path} would both be `{dest}` on the nodes; rename one, or start further up")


def _walk(extra: Sequence[str], cwd: Path) -> Iterator[tuple[str, Path]]:
    """(dest, path) of each file and of all files in each folder."""
    for name in extra:
        path = Path(name)
        if path.is_dir():
            inside = ((file, file.relative_to(path)) for file in path.rglob("*") if file.is_file())
            top = _dest(path, cwd)
            yield from (
                ((Path(top) / rest).as_posix(), file) for file, rest in inside if "__pycache__" not in rest.parts
            )
        elif path.is_file():
            yield _dest(path, cwd), path
        else:
            raise UsageError(f"run.files: no file or folder `{name}` on this machine")


def _mode(path: Path) -> int:
    return 0o755 if os.access(path, os.X_OK) else 0o644
