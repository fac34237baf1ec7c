"""Lists the files of ``templates/`` and copies one so that it works in its new place."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from launcher.errors import UsageError

_BESIDE = Path(__file__).resolve().parents[2]  # a checkout

_INSTALLED = Path(sysconfig.get_path("data"), "share", "gnnfleet")


@dataclass(frozen=True)
class Template:
    """One file that can be copied."""

    name: str
    path: Path
    about: str  #: its first sentence


def templates() -> tuple[Template, ...]:
    """Those of the checkout, or those that were installed along; by name."""
    folder = next((top / "templates" for top in (_BESIDE, _INSTALLED) if (top / "templates").is_dir()), None)
    if folder is None:
        raise UsageError(f"no templates beside gnnfleet, and none in {_INSTALLED}; take them from a checkout")
    return tuple(Template(path.stem, path, _about(path)) for path in sorted(folder.glob("*.yml")))


def _about(path: Path) -> str:
    """The first sentence of its comment, without the commands that follow."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#   "):
            break
        words.append(line[2:])
    return re.split(r"[.:] |[.:]$", " ".join(words))[0]


def named(name: str) -> Template:
    """Raises UsageError that names the nearest one."""
    found = templates()
    wanted = name.removesuffix(".yml").replace("-", "_")
    for one in found:
        if one.name == wanted:
            return one
    near = get_close_matches(wanted, [one.name for one in found], 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(one.name for one in found)}"
    raise UsageError(f"no template `{name}`; {hint} (gnnfleet init --list)")


def copy_of(template: Template, dest: Path) -> str:
    """The template's text for ``dest``: its own name and relative paths are those of the new place."""
    text = template.path.read_text(encoding="utf-8")
    text = re.sub(rf"(?<![\w/])(templates/)?{re.escape(template.path.name)}\b", str(dest), text)
    text = text.replace("../parts/", "parts/")
    for name in set(_outside(text)):
        text = text.replace(f"../{name}", _from(dest.absolute().parent, template.path.parent.parent / name))
    return text


def _outside(text: str) -> Iterator[str]:
    """Names after ``../``, as the folder of examples."""
    for match in re.finditer(r"\.\./([\w.-]+)", text):
        yield match[1]


def _from(folder: Path, path: Path) -> str:
    """``path`` as written in a file of ``folder``: relative where it is below, else absolute."""
    relative = os.path.relpath(path, folder)
    return str(path) if relative.startswith("..") else relative
