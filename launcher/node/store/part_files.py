"""Chooses the files of a partition folder that a node needs, by the manifest in a store."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from launcher.node.json_reader import loads
from launcher.node.remote_folder import NotStored, RemoteFolder, StoreError
from launcher.node.store.fetch import MANIFEST, StoredFile

_MOST = 1 << 28  # bytes of a manifest

_PATH = re.compile(r"(shared|part[0-9]+)(/(?!\.\.?(/|$))[^/\0]+)+")


class OtherParts(StoreError):
    """The store has no parts, or others than those that are wanted."""


def stored_files(store: RemoteFolder, parts: Iterable[int], *, replicated: bool, sha256: str = "") -> list[StoredFile]:
    """Return the files that a node with ``parts`` needs; the manifest, which is read from the store, is the last one.

    replicated: also the 1-d arrays of all other parts. sha256: that of the manifest; '' for any manifest. Raises
    OtherParts, and StoreError if the store cannot be read.
    """
    try:
        raw = store.read(MANIFEST, 0, _MOST)
    except NotStored:
        raise OtherParts(
            f"{store.url} has no parts, as it has no {MANIFEST}; upload them: gnnfleet partition push --config FILE"
        ) from None
    found = hashlib.sha256(raw).hexdigest()
    if sha256 and found != sha256:
        raise OtherParts(
            f"{store.url} has other parts than those that the run was exported for ({MANIFEST} {found[:12]}, not "
            f"{sha256[:12]}); export the run again, or replace the parts: gnnfleet partition push --config FILE --force"
        )
    files = []  # each with whether it is a 1-d array of a part
    try:
        for file in loads(raw)["files"]:
            path, size, digest = file["path"], file["bytes"], file["sha256"]
            if not _PATH.fullmatch(path) or not isinstance(size, int) or not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"damaged entry of {path!r}")
            flat = path.startswith("part") and len(file.get("shape", ())) == 1
            files.append((StoredFile(path, size, digest), flat))
    except (ValueError, TypeError, KeyError) as error:
        raise OtherParts(f"{store.url}/{MANIFEST}: not a usable partition manifest ({error})") from None
    tops = {"shared", *(f"part{part}" for part in parts)}
    if missing := tops - {"shared"} - {file.path.split("/", 1)[0] for file, _ in files}:
        raise OtherParts(f"{store.url} has no {min(missing)}; partition the graph into more parts, or export again")
    wanted = [file for file, flat in files if file.path.split("/", 1)[0] in tops or (replicated and flat)]
    return [*wanted, StoredFile(MANIFEST, len(raw), found)]
