"""Lists the files of ``templates/``, and adapts a copy of one to its new folder."""

from __future__ import annotations

import os
import re
import sysconfig
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from launcher.errors import UsageError
from launcher.files import CODE_ROOT

#: Where pip puts them: in a virtual environment, with --user, with --target.
_INSTALLED = tuple(
    Path(top, "share", "gnnfleet")
    for top in (sysconfig.get_path("data"), sysconfig.get_path("data", f"{os.name}_user"), CODE_ROOT)
)


@dataclass(frozen=True)
class Template:
    name: str
    path: Path
    about: str  #: first sentence of its comment


def templates() -> tuple[Template, ...]:
    """Return the templates of the checkout or installation, sorted by name. Raises UsageError if there are none."""
    tops = (CODE_ROOT, *_INSTALLED)
    folder = next((top / "templates" for top in tops if (top / "templates" / "local.yml").is_file()), None)
    if folder is None:
        raise UsageError(f"no templates in {CODE_ROOT} or {_INSTALLED[0]}; copy them from a checkout of gnnfleet")
    found = []
    for path in sorted(folder.glob("*.yml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = takewhile(lambda line: line.startswith("# ") and not line.startswith("#   "), lines)
        about = re.split(r"[.:] |[.:]$", " ".join(line[2:] for line in comment))[0]
        found.append(Template(path.stem, path, about))
    return tuple(found)


def named(name: str) -> Template:
    """Return the template called ``name``. Raises UsageError if it does not exist; the message suggests other names."""
    found = templates()
    wanted = name.removesuffix(".yml").replace("-", "_")
    for one in found:
        if one.name == wanted:
            return one
    near = get_close_matches(wanted, [one.name for one in found], 1)
    hint = f"did you mean {near[0]}?" if near else f"the templates are {', '.join(one.name for one in found)}"
    raise UsageError(f"no template `{name}`; {hint} (gnnfleet init --list)")


def copy_of(template: Template, dest: Path) -> str:
    """Return the template's text as it will be stored in the file ``dest``.

    In the text, the template's file name is replaced by ``dest``, and relative paths are adapted to its folder.
    """
    text = template.path.read_text(encoding="utf-8")
    text = re.sub(rf"(?<![\w/])(templates/)?{re.escape(template.path.name)}\b", str(dest), text)
    text = text.replace("../parts/", "parts/")
    for name in set(re.findall(r"\.\./([\w.-]+)", text)):
        path = template.path.parent.parent / name
        relative = os.path.relpath(path, dest.absolute().parent)
        text = text.replace(f"../{name}", str(path) if relative.startswith("..") else relative)
    return text
