"""A folder at a URL, read and written by fsspec. No other module of ``launcher.node`` imports an installed package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from launcher.node.regular_file import make_way

#: Package that fsspec needs for the URLs of a scheme.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}

# Short waits, as every read is repeated: botocore's defaults would wait minutes for a lost server.
_S3_CLIENT = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2, "mode": "standard"}}


class StoreError(Exception):
    """An operation on a store failed. The text names the URL and what to do.

    ``retry``: whether the operation may succeed when it is repeated.
    """

    def __init__(self, text: str, *, retry: bool = False):
        super().__init__(text)
        self.retry = retry


class NotStored(StoreError):
    """The store has no file of this name."""


class AccessDenied(StoreError):
    """The credentials do not suffice.

    S3 gives the same answer for a missing file if the credentials do not permit listing the bucket.
    """


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, as ``s3``; '' if ``url`` is not a URL."""
    return url.partition("://")[0].lower() if "://" in url else ""


class RemoteFolder:
    """The folder at ``url``. Its methods may be called from several threads.

    ``options``: storage options of fsspec for this kind of store, such as ``endpoint_url``. Paths are relative to the
    folder. Raises StoreError, also from the constructor if a package is missing.
    """

    def __init__(self, url: str, options: dict[str, Any]):
        self.url = url.rstrip("/")
        scheme = scheme_of(url)
        self.is_local = scheme in ("file", "local")
        # Sizes of files are asked for again, as other machines write to the store.
        defaults: dict[str, Any] = {"auto_mkdir": True} if self.is_local else {"use_listings_cache": False}
        if scheme == "s3":
            defaults["config_kwargs"] = _S3_CLIENT
        try:
            import fsspec

            settings = {**defaults, **options}
            self._fs, self._path = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **settings)
        except ImportError as error:
            package = PACKAGES.get(scheme, error.name or "fsspec")
            raise StoreError(
                f"{self.url}: the package {package} is not installed on this machine; install it: pip install {package}"
            ) from None
        except Exception as error:  # every file system has exceptions of its own
            raise StoreError(
                f"{self.url} cannot be opened ({_text(error)}); check data.store and data.store_options"
            ) from None

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return bytes ``start`` to ``end`` of a file, by default all. Raises NotStored, also for a folder or pipe."""
        with self._errors("read", path):
            if self.is_local and not os.path.isfile(self._at(path)):
                raise FileNotFoundError
            return bytes(self._fs.cat_file(self._at(path), start=start, end=end))

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if the file does not exist."""
        try:
            with self._errors("read", path):
                return int(self._fs.info(self._at(path))["size"])
        except NotStored:
            return None

    def write(self, path: str, data: bytes) -> None:
        """Write a small file. It becomes visible only when it is complete."""
        with self._errors("written", path):
            self._make_way(path)
            if not self.is_local:
                self._fs.pipe_file(self._at(path), data)
                return
            temporary = f"{self._at(path)}.{os.getpid()}.tmp"
            self._fs.pipe_file(temporary, data)
            os.replace(temporary, self._at(path))

    def upload(self, source: str, path: str, on_bytes: Callable[[int], None]) -> None:
        """Copy the local file ``source`` to ``path``; ``on_bytes`` gets the number of bytes since its last call."""
        from fsspec.callbacks import Callback

        class Counter(Callback):
            count = 0

            def relative_update(self, inc: int = 1) -> None:
                self.count += inc
                on_bytes(inc)

        counter = Counter()
        with self._errors("written", path):
            self._make_way(path)
            self._fs.put_file(source, self._at(path), callback=counter)
        on_bytes(os.path.getsize(source) - counter.count)  # some file systems do not report what they copy

    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        try:
            with self._errors("deleted", path):
                self._make_way(path)
                self._fs.rm_file(self._at(path))
        except NotStored:
            return

    def files(self) -> list[str]:
        """Return the paths of all files in the folder and below; [] if it does not exist."""
        try:
            with self._errors("read", ""):
                return sorted(name[len(self._path) :].lstrip("/") for name in self._fs.find(self._path))
        except NotStored:
            return []

    def _make_way(self, path: str) -> None:
        if self.is_local:
            make_way(self._at(path), self._path)

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"

    @contextmanager
    def _errors(self, done: str, path: str) -> Iterator[None]:
        where = f"{self.url}/{path}".rstrip("/")
        try:
            yield
        except FileNotFoundError:
            if done == "written":
                raise StoreError(f"{self.url} cannot be written: the bucket does not exist; create it first") from None
            raise NotStored(f"{where} does not exist in the store") from None
        except PermissionError as error:
            raise AccessDenied(
                f"{where} cannot be {done} (access denied: {_text(error)}); give the user of this machine credentials "
                "for the store, or set them in `env` of the node"
            ) from None
        except Exception as error:  # every file system has exceptions of its own
            credentials = "Credentials" in type(error).__name__
            raise StoreError(
                f"{where} cannot be {done} ({_text(error)}); check the address of the store, the network to it and the "
                "credentials",
                retry=not credentials,
            ) from None


def _text(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
