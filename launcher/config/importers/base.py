"""What the readers of other launchers' files give: a tree of our config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.yaml_tree import Origin, Scalar, Section, Tree
from launcher.config.yaml_tree import Sequence as TreeList
from launcher.errors import ConfigError, Problem


@dataclass(frozen=True)
class Foreign:
    """A foreign file as a cluster.yml."""

    kind: str  #: what it was taken for, in words
    tree: Section  #: keys of ours; origins are places in the foreign file
    notes: tuple[str, ...] = ()
    batch_per_process: bool = False  #: what --batch_size counts there


def text(origin: Origin, value: str) -> Scalar:
    return Scalar(origin, value, "str")


@dataclass(frozen=True)
class Source:
    """A file as the user named it."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        return str(self.path)

    def at(self, line: int) -> Origin:
        return Origin(self.name, line, self.path.absolute().parent)

    def wrong(self, line: int, message: str) -> ConfigError:
        """One mistake, to be raised."""
        return ConfigError([Problem(self.name, line, message)])

    def lines(self, comment: str = "#") -> list[tuple[int, str]]:
        """(line, text) of lines that say something, from 1, without comments."""
        bare = (re.split(rf"(?:^|\s)[{comment}]", line, maxsplit=1)[0].strip() for line in self.text.splitlines())
        return [(number, line) for number, line in enumerate(bare, 1) if line]


def number(origin: Origin, value: int | str) -> Scalar:
    return Scalar(origin, str(value), "int")


def listed(origin: Origin, items: Sequence[Tree]) -> TreeList:
    return TreeList(origin, tuple(items))


def section(origin: Origin, items: Mapping[str, Tree]) -> Section:
    return Section(origin, dict(items), {name: item.origin for name, item in items.items()})


def said(words: str) -> Origin:
    """The origin of what stands in no file; ``words`` are shown in its place."""
    return Origin(words, 0, Path.cwd())
