"""Reads values of declared types by msgspec, in any thread.

msgspec keeps what it knows of a class at the class, from before it is complete. If two threads read a type for the
first time at once, one of them refuses valid data or crashes. So types become known under one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.RLock()


def convert(value: Any, kind: type[T], strict: bool = True) -> T:
    """Return what JSON holds as a ``kind``. Not ``strict``: a text may be a number. Raises ``ValidationError``."""
    with _lock:
        return msgspec.convert(value, kind, strict=strict)


def parse_json(text: str | bytes, kind: type[T]) -> T:
    """Parse JSON as a ``kind``. Raises ``msgspec.DecodeError``, also for text that is no JSON."""
    with _lock:
        return msgspec.json.decode(text, type=kind)


def msgpack_decoder(kind: type[T], hook: Callable[[type, Any], Any] | None = None) -> msgspec.msgpack.Decoder[T]:
    """Return a decoder of msgpack for any threads. ``hook`` makes the values that msgspec does not know."""
    with _lock:
        return msgspec.msgpack.Decoder(kind, dec_hook=hook)
