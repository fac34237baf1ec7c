"""Mutation fuzzing: passes damaged texts to a function that reads them.

``GNNFLEET_FUZZ_SECONDS`` is the duration of each fuzz test in seconds (default 1), ``GNNFLEET_FUZZ_SEED`` the seed of
the random generator.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("GNNFLEET_FUZZ_SECONDS") or 1)

SEED = os.environ.get("GNNFLEET_FUZZ_SEED", "0")

PATIENCE = 30.0  #: seconds that the reader may take for one text

#: Values that often break programs that read text files.
HOSTILE = (
    "", "~", "null", "-1", "0", "1_", "1__0", ".5", "1e999", "nan", ".inf", "0x10", "0o7", "1:30", "٣", "²",
    "9" * 25, "9" * 5000, "20000000", "1e-3", "true", "off", "[]", "{}", "[[[]]]", "[" * 80, "{a: " * 80, "- " * 80,
    "*a", "&a", "&a [*a]", "<<: *a", "!!python/object:os.system x", "!!binary x", "!!set {a}", "? [a]: b", "|", ">",
    "'", '"', "\\", '"\\0"', '"\\ud800"', '"\\U00110000"', "\x00", "\x1b[31m", "\ufeff", "\u2028", "\t", "\r", "---",
    "...", "%YAML 9.9", "#", "@", "`", "é" * 50, "node[1-4096]", "node[1-99999999]", "n[1-9]x[1-9999]", "n[1-",
    "n[3-1]", "n[a-c]", "[::1]:22", "u@h:99999", ":::::", "a" * 3000, "h[01:16]", "h[a:z]",
    "h[1:99999999999999999999]", "[a][a][a][a][a][a][a][a][a][a][a][a][a][a][a][a][a][a]x", "../../x", "/", "~/x",
    "{node_rank}", "$HOME", "`id`", "a=b", "slots=2", "slots=" + "9" * 5000, "ansible_host={{ x }}",
    "ansible_port=x", "all", "ungrouped", "children", "hosts", "vars", "localhost", "127.0.0.1", "nodes", "data",
    "train", "run", "defaults",
)  # fmt: skip

_TOKEN = re.compile(r"\w+|[^\w\s]|\n[ ]*|[ ]+")


def fuzz(seeds: Sequence[str], read: Callable[[str], object], refusal: type[Exception]) -> None:
    """Call ``read`` for ``SECONDS`` with mutations of the texts ``seeds``.

    Fails if a call takes longer than ``PATIENCE`` seconds, or raises anything other than a ``refusal`` with a message.
    """
    until, case = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        case += 1
        text = mutated(random.Random(f"{SEED} {case}"), seeds)
        began = time.monotonic()
        try:
            read(text)
        except refusal as error:
            assert str(error).strip(), f"no message: {_shown(case, text)}"
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {_shown(case, text)}") from error
        assert time.monotonic() - began < PATIENCE, f"reading took too long: {_shown(case, text)}"


def _shown(case: int, text: str) -> str:
    folder = Path(os.environ.get("GNNFLEET_FUZZ_KEEP") or "/tmp")
    path = folder / f"gnnfleet-fuzz-{os.getpid()}.txt"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return f"case {case} of seed {SEED}, kept in {path}: {text[:500]!r}"


def mutated(draw: random.Random, seeds: Sequence[str]) -> str:
    """Return a mutation of one of ``seeds``, cut to 50,000 characters."""
    text = draw.choice(seeds)
    for _ in range(draw.choice((1, 1, 2, 3, 5, 10))):
        text = draw.choice(_MUTATIONS)(draw, text, seeds)
    return text[:50_000]


def _token(draw: random.Random, text: str, seeds: Sequence[str]) -> str:
    spans = [match.span() for match in _TOKEN.finditer(text)] or [(0, 0)]
    start, end = draw.choice(spans)
    other = draw.choice(_TOKEN.findall(draw.choice(seeds)) or [""])
    return text[:start] + draw.choice((draw.choice(HOSTILE), other, "")) + text[end:]


def _value(draw: random.Random, text: str, seeds: Sequence[str]) -> str:
    spans = [match.span(1) for match in re.finditer(r"(?:[:=]|- ) *([^\n,}\]]*)", text)] or [(0, 0)]
    start, end = draw.choice(spans)
    return text[:start] + draw.choice(HOSTILE) + text[end:]


def _line(draw: random.Random, text: str, seeds: Sequence[str]) -> str:
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    kind = draw.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines[at:at] = [lines[at]] * draw.choice((1, 2, 50))
    elif kind == 2:
        lines.insert(draw.randrange(len(lines)), lines.pop(at))
    elif kind == 3:
        lines[at] = " " * draw.randrange(6) + lines[at].lstrip()
    else:
        lines.insert(at, draw.choice(draw.choice(seeds).split("\n")))
    return "\n".join(lines)


def _cut(draw: random.Random, text: str, seeds: Sequence[str]) -> str:
    start, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    return draw.choice((text[:start], text[start:], text[:start] + text[end:], text[:start] + draw.choice(seeds)))


def _character(draw: random.Random, text: str, seeds: Sequence[str]) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + chr(draw.choice((draw.randrange(128), draw.randrange(0xD800)))) + text[at + draw.randrange(2) :]


_MUTATIONS = (_token, _token, _value, _value, _value, _line, _line, _cut, _character)

#: Mark of fuzz tests: pytest's time limit is longer than the duration of the test.
unhurried = pytest.mark.timeout(SECONDS + 300)
