"""Reads JSON that may be damaged or hostile: from other nodes and users, user scripts, other versions, full disks.

``loads`` is the only place where such JSON is parsed: it limits length and depth. Lines that are not JSON objects are
ignored, fields of the wrong type count as missing, and undeclared fields are kept unchecked. ``json_records``
declares the records. Python 3.8, standard library only.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from launcher.node.regular_file import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Validator = Callable[[Any], Any]  #: validates a value: returns it, normalised, or raises ValueError

MAX_LINE = 1 << 26  #: characters of a line or file of JSON; a longer one counts as damaged

MAX_DEPTH = 50  #: lists and objects in each other; Python's own limit depends on the calls under way

_LARGEST = 1 << 63  # integers are in -_LARGEST .. _LARGEST - 1

_LATEST = 1e11  # seconds since the epoch, year 5138; far larger values overflow in ``time``


# -- validators ------------------------------------------------------------


def text(value: Any) -> str:
    """Return a string, with NUL and characters that UTF-8 cannot encode replaced. Raises ValueError for other types."""
    if not isinstance(value, str):
        raise ValueError
    if not value.isascii():
        value = value.encode("utf-8", "replace").decode()
    return value.replace("\0", "\ufffd")


def real(value: Any) -> float:
    """Return a number, which may be NaN or infinite. Raises ValueError for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, int) and not _fits(value)):
        raise ValueError
    return value


def number(value: Any) -> float:
    """Return a finite number. Raises ValueError for other values."""
    if not math.isfinite(real(value)):
        raise ValueError
    return value  # type: ignore[no-any-return]


def moment(value: Any) -> float:
    """Return a time in seconds since the epoch. Raises ValueError for other values."""
    if not 0 <= number(value) < _LATEST:
        raise ValueError
    return value  # type: ignore[no-any-return]


def whole(value: Any) -> int:
    """Return a signed 64-bit integer. Raises ValueError for other values."""
    if type(value) is not int or not _fits(value):
        raise ValueError
    return value


def natural(value: Any) -> int:
    """Return an integer >= 0, such as a rank. Raises ValueError for other values."""
    if whole(value) < 0:
        raise ValueError
    return int(value)


def flag(value: Any) -> bool:
    """Return True for the JSON value ``true``, and False for every other value."""
    return value is True


def one_of(*words: str) -> Validator:
    """Return a validator that accepts only the strings ``words``."""

    def kind(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return kind


def matching(pattern: str) -> Validator:
    """Return a validator for strings that match the regular expression ``pattern`` completely."""
    compiled = re.compile(pattern)

    def kind(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError
        return value

    return kind


def none_or(kind: Validator) -> Validator:
    """Return a validator that accepts None and the values that ``kind`` accepts."""
    return lambda value: None if value is None else kind(value)


def items(kind: Validator) -> Validator:
    """Return a validator for lists that removes the items that ``kind`` rejects."""

    def listed(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise ValueError
        return [one for ok, one in (_tried(kind, each) for each in value) if ok]

    return listed


def table(kind: Validator, key: str = r"\d{1,9}") -> Validator:
    """Return a validator for JSON objects that removes invalid entries.

    The key of an entry must match the regular expression ``key`` completely, and its value must pass ``kind``.
    """
    known = re.compile(key)

    def kept(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError
        tried = {name: _tried(kind, one) for name, one in value.items() if known.fullmatch(str(name))}
        return {name: one for name, (ok, one) in tried.items() if ok}

    return kept


class Record:
    """A validator for JSON objects with declared fields.

    need: validator of each required field. may: validator of each optional field; an invalid field is removed.
    default: (validator, default) of each further field. A missing or invalid field gets the default; a default that is
    a function is called for the value.
    """

    def __init__(
        self, need: dict[str, Validator], default: dict[str, tuple[Validator, Any]], may: dict[str, Validator]
    ) -> None:
        self._need, self._default, self._may = need, default, may

    def __call__(self, value: Any) -> dict[str, Any]:
        """Return a validated copy of ``value``; raises ValueError if a required field is missing or wrong."""
        if not isinstance(value, dict):
            raise ValueError
        found = dict(value)
        for name, kind in self._need.items():
            if name not in value:
                raise ValueError(name)
            found[name] = kind(value[name])
        for name, (kind, other) in self._default.items():
            ok, one = _tried(kind, value[name]) if name in value else (False, None)
            found[name] = one if ok else other() if callable(other) else other
        for name, kind in self._may.items():
            if name in value:
                ok, found[name] = _tried(kind, value[name])
                if not ok:
                    del found[name]
        return found


def _tried(kind: Validator, value: Any) -> tuple[bool, Any]:
    try:
        return True, kind(value)
    except ValueError:
        return False, None


def _fits(value: int) -> bool:
    return -_LARGEST <= value < _LARGEST


# -- texts -----------------------------------------------------------------


def loads(data: str | bytes, most: int = MAX_LINE) -> Any:
    """Return the value in a text of JSON of at most ``most`` characters.

    Raises ValueError for every other text, also for one that is nested more than ``MAX_DEPTH`` deep.
    """
    if len(data) > most:
        raise ValueError(f"longer than {most} characters")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    begins = data.count(b"[") + data.count(b"{") if isinstance(data, bytes) else data.count("[") + data.count("{")
    level, depth = [value] if begins > MAX_DEPTH else [], 0
    while level:
        if depth == MAX_DEPTH:
            raise ValueError("nested too deeply")
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level, depth = [one for several in inner for one in several if isinstance(one, (dict, list))], depth + 1
    return value


def read_json(path: str, most: int = MAX_LINE) -> Any:
    """Return the value in a file of JSON; None if the file does not exist. Raises OSError and ValueError."""
    try:
        with open_regular(path) as file:
            return loads(file.read(most + 1), most)
    except FileNotFoundError:
        return None


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """Parse the last JSON object in a line of text; None if there is none.

    If a full disk has truncated an object, the next object follows in the same line.
    """
    value = parsed(line)
    if value is None and isinstance(line, bytes):
        line = line.decode("utf-8", "replace")
    if value is None and isinstance(line, str):
        at = line.rfind('{"t": ')
        value = parsed(line[at:]) if at > 0 else None
    return value if isinstance(value, dict) else None


def parsed(line: str | bytes) -> Any:
    """Return the value in a text of JSON; None if it is not JSON."""
    try:
        return loads(line)
    except ValueError:
        return None


def records(kind: Record, lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """Return the valid records of ``kind`` in lines of JSON; skip all other lines."""
    tried = (_tried(kind, json_object(line)) for line in lines)
    return [one for ok, one in tried if ok]


def record_in(kind: Record, file: str) -> dict[str, Any] | None:
    """Return the record in a file; None if the file does not exist or contains no record of ``kind``."""
    try:
        with open_regular(file) as opened:
            data = opened.read(MAX_LINE + 1)
    except (OSError, ValueError):  # ValueError: the name contains a NUL
        return None
    return checked(kind, json_object(data))


def checked(kind: Record, value: Any) -> dict[str, Any] | None:
    """Return a validated copy of ``value`` as a record of ``kind``; None if it is invalid."""
    ok, one = _tried(kind, value)
    return one if ok else None
