"""The packages that hosts need, in the versions of this machine, and the platforms for which wheels are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, is_normalized_name

from launcher.errors import UsageError
from launcher.node.programs.packages import PACKAGES
from launcher.setup.own_wheel import NAME, cache_folder, own_wheel
from launcher.text import index

_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}  # minor version of the oldest manylinux tag; 17 for other architectures

_ALIASES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

_OF_CUDA = ("cuda-", "nvidia-", "numba-cuda")  # first characters of packages whose versions follow torch's CUDA


@dataclass(frozen=True, order=True)
class Target:
    """The kind of environment that wheels must fit."""

    python: str  #: version with two numbers, "3.11"
    arch: str  #: as printed by `uname -m`
    glibc: str  #: "2.36"; '' with another C library, for which only wheels of musl and pure Python fit
    build: str  #: build of torch: "cpu", "cu126", or '' for the one on the package index
    kernels: bool = False  #: whether the trainer compiles kernels for GPUs there, with numba-cuda

    @property
    def pip_words(self) -> tuple[str, ...]:
        """Options with which pip chooses wheels for this target."""
        platforms = [word for name in self._platforms() for word in ("--platform", name)]
        words = ("--only-binary=:all:", "--implementation", "cp", "--python-version", self.python, *platforms)
        return (*words, *(word for words in index(self.build) for word in words.split()))

    def _platforms(self) -> Iterator[str]:
        if not self.glibc:
            yield from (f"musllinux_1_{minor}_{self.arch}" for minor in (2, 1))
            return
        for minor in range(int(self.glibc.split(".")[1]), _OLDEST_GLIBC.get(self.arch, 17) - 1, -1):
            yield f"manylinux_2_{minor}_{self.arch}"
            if minor in _ALIASES:
                yield f"{_ALIASES[minor]}_{self.arch}"
        yield f"linux_{self.arch}"

    @property
    def markers(self) -> dict[str, str]:
        """The environment in which markers of requirements are evaluated (PEP 508)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.arch,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def __str__(self) -> str:
        return f"Python {self.python} on {self.arch}"


def _requires_here(name: str) -> Iterable[str]:
    """Return the requirements of a package of this machine, as text (PEP 508); () if it is not installed."""
    try:
        return metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return ()


@dataclass(frozen=True)
class Requirements:
    """The packages that hosts need: ``roots``, and what these require."""

    roots: tuple[str, ...]  #: as requirements (PEP 508), such as ``torch`` or ``numba-cuda[cu13]>=0.30``
    pins: Mapping[str, str]  #: version of each package of this machine, by canonical name
    requires: Callable[[str], Iterable[str]] = _requires_here  #: what packages require, as far as known

    def line(self, name: str, target: Target, requirement: str = "") -> str:
        """Return what pip is to install for package ``name``, such as ``numpy==2.1.0``.

        The version is that on this machine. If this machine lacks the package, returns ``requirement``; so it does if
        the package belongs to CUDA, and ``requirement`` asks for the CUDA of ``target`` instead of this machine's. For
        torch, the build (such as ``+cu126``) is that of ``target``.
        """
        version = self.pins.get(name, "")
        if name.startswith(_OF_CUDA) and requirement:
            if not version or not Requirement(requirement).specifier.contains(version, prereleases=True):
                return requirement
        if name == "torch" and version:
            plain = version.partition("+")[0]
            return f"torch==={plain}+{target.build}" if target.build else f"torch==={plain}"
        return f"{name}=={version}" if version else requirement or name


def required(more: Sequence[str] = ()) -> Requirements:
    """Return the packages of the bundled trainer, pip and ``more``, pinned to the versions of this machine.

    For gnnfleet itself, makes its wheel. Raises UsageError if one of ``more`` is not the name of a package.
    """
    for name in more:
        if not is_normalized_name(canonicalize_name(name)):
            raise UsageError(f"--with {name}: give the name of a package only; its version is that on this machine")
    found = {str(canonicalize_name(one.name)): one.version for one in metadata.distributions() if one.name}
    names = dict.fromkeys(canonicalize_name(name) for name in (*PACKAGES, *more))
    if NAME in names:
        found[NAME] = own_wheel(cache_folder() / "wheels")["metadata"]["version"]
    return Requirements((*names, "pip"), found)


def closure(roots: Iterable[str], requires: Callable[[str], Iterable[str]], target: Target) -> dict[str, str]:
    """Return the roots and all packages that they require on ``target``, directly or indirectly.

    The result maps the name of a package to the name with all limits on its version: ``nvidia-nvtx<14,>=13``.
    ``roots``: requirements as text (PEP 508). ``requires(name)``: those of a package; () if they are unknown.
    """
    found: dict[str, SpecifierSet] = {}
    waiting: list[tuple[str, str]] = []  # packages and their extras
    seen: set[tuple[str, str]] = set()

    def add(one: Requirement) -> None:
        needed = canonicalize_name(one.name)
        found[needed] = found.get(needed, SpecifierSet()) & one.specifier
        for step in ((needed, each) for each in ("", *sorted(one.extras))):
            if step not in seen:
                seen.add(step)
                waiting.append(step)

    for root in roots:
        add(Requirement(root))
    while waiting:
        name, extra = waiting.pop()
        for text in requires(name):
            try:
                one = Requirement(text)
            except InvalidRequirement:
                continue  # pip ignores it as well
            if one.marker and not one.marker.evaluate({**target.markers, "extra": extra}):
                continue
            add(one)
    return {name: f"{name}{specifiers}" for name, specifiers in found.items()}
