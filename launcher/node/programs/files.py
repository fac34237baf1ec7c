"""Node program: compares files with digests, puts transferred files in place, unpacks code. Standard library only.

``main(request)`` answers one request, by its "op": ``inventory`` (also of code folders) and ``commit`` for sync and
verify, ``unpack`` for code, ``disk`` for free space, ``claim`` and ``release`` for the run folder of a new run.
"""

from __future__ import annotations

import os
import sys

from launcher.node.regular_file import make_way, open_regular

TYPE_CHECKING = False  # a request imports only what it needs: all these modules take longer than Python takes to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Entry = dict[str, Any]

CACHE_NAME = ".gnnfleet-digests.json"

PART_SUFFIX = ".part"


#: In a code folder: SHA-256 of the rest of this file, then path and SHA-256 of each code file, one per line.
CODE_LIST = ".gnnfleet-code"

# In the run folder of a node: names the launch that made it.
_CLAIM = ".gnnfleet-launch"


class DigestCache:
    """SHA-256 digests of files, with a cache file in each folder; valid while size and mtime (ns) are unchanged.

    A process of a run that finds a damaged file in a partition folder deletes the cache files there
    (trainer/store/part_files.py). Manifests are not cached: they say which files are damaged.
    """

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Entry]] = {}
        self.changed: set[str] = set()

    def digest(self, path: str) -> str:
        """Return the hex digest of ``path``, computed only if its size or mtime has changed. Raises OSError."""
        folder, name = os.path.split(path)
        known = self._folder(folder).get(name)
        stat = os.stat(path)
        wanted = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        unchanged = isinstance(known, dict) and {**known, **wanted} == known and "sha256" in known
        if known and unchanged and name != "manifest.json":
            return str(known["sha256"])
        found = sha256_of(path)
        self.remember(path, found, stat)
        return found

    def remember(self, path: str, sha256: str, stat: os.stat_result) -> None:
        """Cache ``sha256`` as the digest of ``path``, valid for the size and mtime in ``stat``."""
        folder, name = os.path.split(path)
        self._folder(folder)[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
        self.changed.add(folder)

    def save(self) -> None:
        """Write the changed cache files; failures, as in a read-only folder, are only logged to stderr."""
        import json

        for folder in self.changed:
            try:
                write_whole(os.path.join(folder, CACHE_NAME), json.dumps(self.folders[folder]).encode())
            except OSError as error:
                print(f"no digest cache in {folder}: {error}", file=sys.stderr)

    def _folder(self, folder: str) -> dict[str, Entry]:
        import json

        if folder not in self.folders:
            try:
                with open_regular(os.path.join(folder, CACHE_NAME)) as stream:
                    read = dict(json.load(stream))
            except (OSError, ValueError, TypeError, RecursionError):
                read = {}
            self.folders.setdefault(folder, read)  # another thread may have read it, and added to it, meanwhile
        return self.folders[folder]


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError."""
    import hashlib

    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_whole(path: str, data: bytes) -> None:
    """Atomically replace ``path`` by ``data``. Raises OSError."""
    import tempfile

    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".gnnfleet-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def inventory(files: list[Entry], below: str = "") -> list[Entry]:
    """Compare files with their expected size and digest; return ``{path, state, have, error}`` for each file.

    files: ``{path, bytes, sha256}`` of each file. below: folder that has only files that are sent; what stands there in
    the place of a file is deleted. state: present (size and digest match), different, missing, or
    partial (an incomplete transfer, ``.part``). have: how many bytes are on this node. error: message of the system, or
    ''.
    """
    if not files:
        return []
    from concurrent.futures import ThreadPoolExecutor

    cache, below = DigestCache(), os.path.expanduser(below)
    if below and os.path.lexists(below) and not os.path.isdir(below) and not os.path.islink(below):
        os.unlink(below)  # a link may lead to a disk that is not mounted; it stays, and sync says that it leads nowhere
    for path in [os.path.expanduser(entry["path"]) for entry in files] if below else ():
        if path.startswith(below + os.sep):
            make_way(path, below)
            make_way(path + PART_SUFFIX, below)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda entry: _look(entry, cache), files))
    cache.save()
    return found


def _look(entry: Entry, cache: DigestCache) -> Entry:
    path = os.path.expanduser(entry["path"])
    answer: Entry = {"path": entry["path"], "state": "missing", "have": 0, "error": ""}
    try:
        if os.path.isfile(path):
            size = os.path.getsize(path)
            same = size == entry["bytes"] and cache.digest(path) == entry["sha256"]
            answer.update(state="present" if same else "different", have=size)
        if answer["state"] != "present" and os.path.isfile(path + PART_SUFFIX):
            size = os.path.getsize(path + PART_SUFFIX)
            if size <= entry["bytes"]:
                answer.update(state="partial", have=size)
    except OSError as error:
        answer.update(state="different", error=str(error))
    return answer


def commit(files: list[Entry]) -> list[Entry]:
    """Rename each ``.part`` file to its final name if the digest matches, else delete it; return ``{path, error}``.

    files: ``{path, sha256[, mode]}`` of each file.
    """
    cache = DigestCache()
    answers = [{"path": entry["path"], "error": _commit_one(entry, cache)} for entry in files]
    cache.save()
    return answers


def _commit_one(entry: Entry, cache: DigestCache) -> str:
    path = os.path.expanduser(entry["path"])
    part = path + PART_SUFFIX
    try:
        if not os.path.exists(part) and os.path.isfile(path) and cache.digest(path) == entry["sha256"]:
            return ""  # another run has transferred the same file meanwhile
        found = sha256_of(part)
        if found != entry["sha256"]:
            os.unlink(part)
            return f"digest {found[:12]} after transfer, expected {entry['sha256'][:12]}"
        _to_disk(part)
        os.chmod(part, entry.get("mode", 0o644))
        os.replace(part, path)
        _to_disk(os.path.dirname(path))
        cache.remember(path, found, os.stat(path))
        return ""
    except OSError as error:
        return str(error)


def _to_disk(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unpack(archive: str, sha256: str, dest: str) -> str:
    """Unpack a tar archive into the folder ``dest`` and delete the archive; return why it is damaged, or ''.

    Raises OSError. A new ``dest`` appears atomically. In an existing one, each file is replaced atomically.
    """
    archive, dest = os.path.expanduser(archive), os.path.expanduser(dest)
    if sha256_of(archive) != sha256:
        os.unlink(archive)
        return "the archive's digest is wrong after transfer"
    temporary = os.path.join(os.path.dirname(dest), ".unpack-" + os.urandom(8).hex())
    os.mkdir(temporary, 0o700)
    try:
        _extract(archive, temporary)
        os.chmod(temporary, 0o755)
        try:
            if os.path.lexists(dest) and not os.path.isdir(dest):
                os.unlink(dest)
            os.rename(temporary, dest)
        except OSError:
            if not os.path.isdir(dest):
                raise
            # Compiled modules go, too: they may come from a damaged file of the same size and time.
            import shutil

            for folder, _, names in os.walk(temporary):
                into = os.path.normpath(os.path.join(dest, os.path.relpath(folder, temporary)))
                for name in names:
                    make_way(os.path.join(into, name), dest)
                os.makedirs(into, exist_ok=True)
                shutil.rmtree(os.path.join(into, "__pycache__"), ignore_errors=True)
                for name in names:
                    os.replace(os.path.join(folder, name), os.path.join(into, name))
        os.unlink(archive)
        return ""
    finally:
        if os.path.isdir(temporary):
            import shutil

            shutil.rmtree(temporary, ignore_errors=True)


def code_list(files: list[tuple[str, str]]) -> bytes:
    """Return the content of ``CODE_LIST`` for files, each with path and SHA-256."""
    import hashlib

    text = "".join(f"{path}\0{sha256}\n" for path, sha256 in files).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def has_code(folder: str) -> bool:
    """Whether a code folder has all files of its list, with the content that was sent."""
    folder = os.path.expanduser(folder)
    try:
        with open_regular(os.path.join(folder, CODE_LIST)) as stream:
            listed = stream.read()
        files = [tuple(line.split("\0")) for line in listed.decode().splitlines()[1:]]
        whole = listed == code_list(files)  # type: ignore[arg-type]
        return whole and all(sha256_of(os.path.join(folder, path)) == sha256 for path, sha256 in files)
    except (OSError, ValueError):
        return False


def _extract(archive: str, folder: str) -> None:
    # The program tar takes a third of the CPU time of the module tarfile, but need not be installed.
    argv = ["tar", "-xzf", archive, "-C", folder, "--no-same-owner"]
    try:
        actions = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        if os.waitpid(os.posix_spawnp("tar", argv, os.environ, file_actions=actions), 0)[1] == 0:
            return
    except OSError:
        pass  # there is no such program
    import tarfile

    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)


def disk(path: str) -> Entry:
    """Return ``{path, free: bytes}`` of the file system of ``path``, or of the nearest existing folder above it."""
    import shutil

    folder = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return {"path": folder, "free": shutil.disk_usage(folder).free}


def claim(folder: str, owner: str) -> bool:
    """Make ``folder`` for the launch ``owner``; return False if it belongs to another launch. Raises OSError.

    It may exist without ``_CLAIM``: this program may run in a folder below it, which is made first.
    """
    mark = os.path.join(os.path.expanduser(folder), _CLAIM)
    os.makedirs(os.path.dirname(mark), exist_ok=True)
    try:
        with open(mark, "x") as stream:
            stream.write(owner)
    except FileExistsError:
        with open(mark) as stream:
            return stream.read() == owner
    return True


def release(folder: str, owner: str) -> bool:
    """Delete ``folder`` if it belongs to the launch ``owner``; return whether it does. Raises OSError."""
    import shutil

    folder = os.path.expanduser(folder)
    with open(os.path.join(folder, _CLAIM)) as stream:
        mine = stream.read() == owner
    if mine:
        shutil.rmtree(folder)
    return mine


def main(request: Entry) -> Entry:
    """Answer one request, named by its "op"; return ``{"error": message, "errno": …}`` after an OSError."""
    operations: dict[str, Callable[[], Entry]] = {
        "inventory": lambda: {
            "files": inventory(request["files"], request.get("below", "")),
            "folders": [has_code(folder) for folder in request["folders"]],
        },
        "commit": lambda: {"files": commit(request["files"])},
        "unpack": lambda: {"error": unpack(request["archive"], request["sha256"], request["dest"])},
        "disk": lambda: disk(request["path"]),
        "claim": lambda: {"mine": claim(request["path"], request["owner"])},
        "release": lambda: {"released": release(request["path"], request["owner"])},
    }
    try:
        return operations[request["op"]]()
    except OSError as error:
        return {"error": str(error), "errno": error.errno}
