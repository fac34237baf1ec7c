"""Host ranges: expands ``node[01-16].lab`` to 16 host names, and folds host names into ranges for messages."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

MOST = 4096  #: maximum number of hosts in one range

PORTS_FROM = 1024  #: a smaller number behind a host is a number of processes for most launchers

SSH_PORT = 22

_BRACKETS = re.compile(r"\[([^\[\]:]*)\]")

_IPV6 = re.compile(r"\[[^\[\]]*:[^\[\]]*\]")

_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")

_DIGITS = re.compile(r"([0-9]+)")


class RangeError(ValueError):
    """An invalid host range; the message explains the mistake, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def is_range(text: str) -> bool:
    """Whether ``text`` is written as a host range: it contains a bracket that is not part of an IPv6 address."""
    return "[" in (rest := _IPV6.sub("", text)) or "]" in rest


def split_list(text: str) -> list[str]:
    """Split a list, as ``a, n[1-3,7], b``, at the commas outside brackets; empty entries are left out."""
    return [word.strip() for word in re.split(r",(?![^\[]*\])", text) if word.strip()]


def expand(text: str) -> list[str]:
    """Return the host names of the range ``text``, in order. Raises RangeError.

    The last bracket varies fastest and leading zeros are kept.
    """
    words = _BRACKETS.split(text)  # alternately text between brackets and text in brackets
    if any(is_range(between) for between in words[::2]):
        raise RangeError(f"`{text}`: its brackets do not match; write a range as node[01-16]")
    spans = [[_span(text, span) for span in inside.split(",")] for inside in words[1::2]]
    number = math.prod(sum(stop - start for start, stop, _ in one) for one in spans)
    if number > MOST:
        raise RangeError(f"`{text}` expands to {number:,} hosts; a range may expand to {MOST:,} at most")
    choices = [[str(n).zfill(width) for start, stop, width in one for n in range(start, stop)] for one in spans]
    pairs = (itertools.zip_longest(words[::2], chosen, fillvalue="") for chosen in itertools.product(*choices))
    return ["".join(map("".join, one)) for one in pairs]


def fold(names: Iterable[str], most: int | None = None) -> str:
    """Return host names as one text with ranges, such as ``node[01-16].lab, gpu1``.

    Consecutive names become one range if they differ only in one number that counts up by one. ``most``: how many
    ranges and single names are listed; of further names the text has only the number, as ``n1, n3, … 7 more``.
    """
    runs: list[list[str]] = []
    for name in names:
        run = runs[-1] if runs else []
        place = _incremented(run[-1], name) if run else None
        if place is not None and (len(run) == 1 or place == _incremented(run[0], run[1])):
            run.append(name)
        else:
            runs.append([name])
    shown = runs if most is None or len(runs) <= most else runs[: most - 1]
    more = sum(map(len, runs[len(shown) :]))
    return ", ".join([*(_range_of(run[0], run[-1]) for run in shown), *([f"… {more:,} more"] if more else [])])


def _span(text: str, span: str) -> tuple[int, int, int]:
    """Parse a span such as ``01-16`` into the first number, the last number + 1, and the width in digits.

    The width is 0 without leading zeros.
    """
    match = _SPAN.fullmatch(span)
    if not match:
        inside = f", found `{span}`" if span else ""
        raise RangeError(f"`{text}`: expected numbers in brackets, as node[01-16] or node[1-3,7]{inside}")
    low, high = match[1], match[2] or match[1]
    if len(low) != len(high) and (_padded(low) or _padded(high)):
        width = max(len(low), len(high))
        raise RangeError(
            f"`{text}`: {low} and {high} have different numbers of leading zeros; "
            f"write {low.zfill(width)}-{high.zfill(width)} or {int(low)}-{int(high)}"
        )
    if int(low) > int(high):
        raise RangeError(f"`{text}`: {span} runs backwards; write {high}-{low}")
    return int(low), int(high) + 1, len(low) if _padded(low) else 0


def _padded(number: str) -> bool:
    return len(number) > 1 and number[0] == "0"


def _incremented(before: str, after: str) -> int | None:
    """Return which number is one higher in ``after`` than in ``before``, as an index into ``_DIGITS.split(before)``.

    Returns None unless this is the only difference between the names.
    """
    one, two = _DIGITS.split(before), _DIGITS.split(after)
    differing = [place for place, (a, b) in enumerate(itertools.zip_longest(one, two)) if a != b]
    if len(one) != len(two) or len(differing) != 1 or not differing[0] % 2:
        return None
    low, high = one[differing[0]], two[differing[0]]
    filled = len(low) == len(high) or not (_padded(low) or _padded(high))
    return differing[0] if filled and int(high) == int(low) + 1 else None


def _range_of(first: str, last: str) -> str:
    if first == last:
        return first
    one, two = _DIGITS.split(first), _DIGITS.split(last)
    pairs = zip(one, two, strict=True)
    return "".join(low if low == high else f"[{low}-{high}]" for low, high in pairs)
