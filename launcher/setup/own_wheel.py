"""Builds the wheel of the gnnfleet that runs here, for ``gnnfleet setup --with gnnfleet``: no package index has it."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.files import CODE_ROOT, atomic_file

NAME = "gnnfleet"


def cache_folder() -> Path:
    """Return the folder of locks and wheels: ``${XDG_CACHE_HOME:-~/.cache}/gnnfleet/setup``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gnnfleet/setup"


@cache
def own_wheel(folder: Path) -> Mapping[str, Any]:
    """Write the wheel to ``folder``, from a checkout or an installed package; return what pip would report on it.

    The version ends with a digest of the content, such as ``0.1.0+g1a2b3c4d``, so that hosts get changed code. Raises
    UsageError if gnnfleet is not installed for this Python.
    """
    try:
        dist = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise UsageError(
            f"--with {NAME}: it is not installed for {sys.executable}, which therefore cannot make its wheel; install "
            f"it: {sys.executable} -m pip install -e {CODE_ROOT}"
        ) from None
    about = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    files = {
        path.relative_to(CODE_ROOT).as_posix(): path.read_bytes()
        for package in (NAME, "launcher", "trainer")
        for path in sorted((CODE_ROOT / package).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    digest = hashlib.sha256(about.encode())
    for name, data in files.items():
        digest.update(f"\0{name}\0".encode() + data)
    version = f"{dist.version.partition('+')[0]}+g{digest.hexdigest()[:8]}"
    info = f"{NAME}-{version}.dist-info"
    texts = {
        "METADATA": re.sub(r"(?m)^Version: .*$", f"Version: {version}", about, count=1),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": dist.read_text("entry_points.txt") or "",
    }
    files |= {f"{info}/{name}": text.encode() for name, text in texts.items()}
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{NAME}-{version}-py3-none-any.whl"
    with atomic_file(path) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(
                zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED
            )  # all of one date: equal code, equal file
    return {
        "metadata": {"name": NAME, "version": version, "requires_dist": dist.requires or []},
        "download_info": {
            "url": path.as_uri(),
            "archive_info": {"hashes": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}},
        },
    }
