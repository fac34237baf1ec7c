"""Decides what each host needs: Python, build of torch, packages, and where their wheels come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from packaging.version import InvalidVersion, Version

from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import device_packages
from launcher.preflight.check_devices import OLDEST_DRIVER
from launcher.preflight.check_packages import OLDEST_PYTHON
from launcher.setup.requirements import Requirements, Target
from launcher.setup.survey import HostState, minor
from launcher.setup.wheels import NoWheels, Wheel, WheelLock
from launcher.text import OWN_VENV

Action = Literal["make", "repair", "none", "shared", "refused"]

_LockOf = Callable[[Target], WheelLock]

_PIP_TOO = "pip"  # not compared in environments that exist: any pip will do


@dataclass(frozen=True)
class Change:
    """A package to install."""

    name: str
    found: str  #: its version in the environment; '' if it is missing
    wanted: str

    def __str__(self) -> str:
        return f"{self.name} {self.found} → {self.wanted}" if self.found else f"{self.name} {self.wanted}"


@dataclass(frozen=True)
class HostPlan:
    """What is to be done for one node."""

    state: HostState
    action: Action
    why: str = ""  #: why it is refused, or another note
    base: str = ""  #: Python that makes the new environment; '' to repair
    lock: WheelLock | None = None  #: None if refused
    changes: tuple[Change, ...] = ()
    fetched: tuple[Wheel, ...] = ()  #: wheels that the host downloads itself
    sent: tuple[Wheel, ...] = ()  #: wheels that this machine sends

    @property
    def note(self) -> str:
        """Why the environment will lack numba-cuda although a node trains on CUDA devices; '' if it will not."""
        installed = self.state.installed
        if self.lock is None or not self.lock.no_kernels or (installed and "numba-cuda" in installed.versions):
            return ""
        effect = "CPUs sample, and layers use slower torch operations"
        return f"numba-cuda, which compiles kernels for GPUs, is left out: {effect}. Reason: {self.lock.no_kernels}"

    @property
    def acts(self) -> bool:
        """Whether this node makes or repairs its environment. If nodes share an environment, only one of them does."""
        return self.action in ("make", "repair")

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """The wheels that the installation needs: changed packages, pip and, if the host has no uv, uv."""
        if self.lock is None:
            return ()
        names = {change.name for change in self.changes} | {"pip"}
        uv = [self.lock.uv] if self.lock.uv and not self.state.uv else []
        return (*(wheel for wheel in self.lock.wheels if wheel.name in names), *uv)


@dataclass(frozen=True)
class SetupPlan:
    """What ``gnnfleet setup`` does, by node_rank."""

    hosts: tuple[HostPlan, ...]

    @property
    def work(self) -> tuple[HostPlan, ...]:
        return tuple(host for host in self.hosts if host.acts)

    @property
    def refused(self) -> tuple[HostPlan, ...]:
        return tuple(host for host in self.hosts if host.action == "refused")

    @property
    def without_tmux(self) -> tuple[HostState, ...]:
        return tuple(host.state for host in self.hosts if not host.state.tmux)


def make_plan(
    config: ResolvedConfig,
    states: Mapping[int, HostState],
    requirements: Requirements,
    lock_of: _LockOf,
    own_python: str,
    build: str | None = None,
) -> SetupPlan:
    """Decide what each host needs. ``with_sources`` then decides where the wheels come from.

    Args:
        states: the hosts that answered, by node_rank.
        lock_of: resolves the wheels of a target; raises NoWheels and SetupError.
        own_python: version of the launching machine's Python, which is preferred.
        build: build of torch for hosts with GPUs; None: chosen by ``_cuda_build``.
    """
    # Processes that use an environment count on all hosts that see its folder.
    users: dict[int, dict[str, None]] = {}
    for state in states.values():
        users.setdefault(state.builder, {}).update(dict.fromkeys(state.in_use))
    states = {k: replace(state, in_use=tuple(users[state.builder])) for k, state in states.items()}
    problems = {k: why for k, state in states.items() if (why := _problem(state))}
    usable = {k: state for k, state in states.items() if k not in problems}
    cuda = build if build is not None else _cuda_build(usable.values(), requirements)

    def host_plan(k: int, state: HostState, python: str) -> HostPlan:
        if k in problems:
            return HostPlan(state, "refused", problems[k])
        if state.builder != k and state.builder in usable:
            return HostPlan(state, "shared", f"the folder of {states[state.builder].label}")
        return _host_plan(state, _use(config, state, usable.values(), cuda), python, lock_of)

    first: NoWheels | None = None
    for python in _common_pythons(usable.values(), minor(own_python)):
        try:
            return SetupPlan(tuple(host_plan(k, state, python) for k, state in states.items()))
        except NoWheels as error:  # packages often have no wheels yet for the newest Python
            first = first or error
    assert first is not None
    raise first


def with_sources(plan: SetupPlan, reached: Mapping[int, Mapping[str, bool]]) -> SetupPlan:
    """Return the plan with the source of each wheel.

    A host downloads a wheel itself if it reaches the wheel's server; otherwise this machine sends the wheel.
    ``reached``: for each node_rank, a dict from server (``Wheel.server``) to whether the host reaches it.
    """

    def sourced(host: HostPlan) -> HostPlan:
        direct = reached.get(host.state.node_rank, {})
        fetched = tuple(wheel for wheel in host.wheels if direct.get(wheel.server))
        return replace(host, fetched=fetched, sent=tuple(wheel for wheel in host.wheels if wheel not in fetched))

    return SetupPlan(tuple(sourced(host) if host.acts else host for host in plan.hosts))


def _problem(state: HostState) -> str:
    """Return why no environment can be made or repaired on a host; '' if nothing prevents it."""
    if state.error:
        return f"{state.error}; correct `venv` of this node"
    if not state.environment:
        return ""  # the system's Python may have all packages
    if state.installed is None and state.exists:
        return f"{state.environment} exists but has no working bin/python; remove it, or name another folder in `venv`"
    return ""


def _common_pythons(states: Iterable[HostState], own: str) -> list[str]:
    """Return the Python versions (two numbers) that all hosts could have, the best one first; [''] if there is none.

    If there are environments, it is the version of most of them. Else ``own`` comes first, then newer versions come
    before older ones.
    """
    states = [state for state in states if state.environment]
    existing = Counter(minor(state.installed.python) for state in states if state.installed)
    existing = Counter({version: number for version, number in existing.items() if _numbers(version) >= OLDEST_PYTHON})
    if existing:
        return [max(existing, key=lambda version: (existing[version], version == own))]
    available = [{one.minor for one in state.pythons if _numbers(one.minor) >= OLDEST_PYTHON} for state in states]
    common = set.intersection(*available) if available else set()
    return sorted(common, key=lambda version: (version == own, _numbers(version)), reverse=True) or [""]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split("."))


def _cuda_build(states: Iterable[HostState], requirements: Requirements) -> str:
    """Return the build of torch for hosts with GPUs: that of most of these hosts, else this machine's, else ''."""
    tags = Counter(
        state.installed.versions.get("torch", "").partition("+")[2]
        for state in states
        if state.gpus and state.installed and state.installed.cuda
    )
    if tags:
        return max(tags, key=lambda tag: tags[tag])
    own = requirements.pins.get("torch", "").partition("+")[2]
    return own if own.startswith("cu") else ""


@dataclass(frozen=True)
class _Use:
    """What an environment is used for, by all nodes that see its folder."""

    build: str  #: of torch, as in ``Target``
    devices: bool  #: a node uses CUDA devices
    kernels: bool  #: a node trains on CUDA devices: the trainer compiles kernels for them
    driver: str  #: oldest NVIDIA driver of these nodes' hosts; '' without

    def target(self, python: str, state: HostState) -> Target:
        return Target(python, state.arch, state.glibc, self.build, self.kernels)


def _use(config: ResolvedConfig, state: HostState, states: Iterable[HostState], cuda: str) -> _Use:
    """Return the use of the environment of ``state``. ``cuda``: build of torch for hosts with GPUs."""
    sharing = [one for one in states if one.builder == state.builder]
    using = [one for one in sharing if one.gpus and config.nodes[one.node_rank].devices]
    drivers = [one.driver for one in (state, *using) if one.driver.split(".")[0].isdigit()]
    return _Use(
        build=cuda if state.gpus or using else "cpu",
        devices=any(config.nodes[one.node_rank].devices for one in sharing),
        kernels=any(device_packages(config.nodes[one.node_rank]) for one in using),
        driver=min(drivers, key=lambda driver: int(driver.split(".")[0]), default=""),
    )


def _host_plan(state: HostState, use: _Use, python: str, lock_of: _LockOf) -> HostPlan:
    installed = state.installed
    if installed is None and not state.environment:
        return HostPlan(state, "refused", f"no Python at `python` or `conda`; set `venv: {OWN_VENV}`")
    if installed is None:
        base = next((one for one in state.pythons if one.minor == python), None)
        if base is None:
            found = ", ".join(one.version for one in state.pythons) or "none with the module venv"
            why = f"no Python {python}, which the other hosts use (here: {found}); install it there"
            if not python:
                needed = f"{'.'.join(map(str, OLDEST_PYTHON))} or newer"
                why = f"no Python version of {needed} is on all hosts (here: {found}); install one on all of them"
            return HostPlan(state, "refused", why)
        lock = lock_of(use.target(python, state))
        changes = tuple(Change(wheel.name, "", wheel.version) for wheel in lock.wheels)
        return _checked(HostPlan(state, "make", base=base.program, lock=lock, changes=changes), use)
    if _numbers(minor(installed.python)) < OLDEST_PYTHON or (python and minor(installed.python) != python):
        needed = python or ".".join(map(str, OLDEST_PYTHON))
        why = f"its Python is {installed.python}, but {needed} is needed; remove {installed.prefix}, then run again"
        return HostPlan(state, "refused", why)
    lock = lock_of(use.target(minor(installed.python), state))
    # Packages that are missing, have another version or were not installed completely.
    wrong: list[Change] = []
    for wheel in lock.wheels:
        if wheel.name == _PIP_TOO:
            continue
        version = installed.versions.get(wheel.name, "")
        again = wheel.name in installed.unfinished or "?" in installed.unfinished
        if again or not _same(version, wheel.version, wheel.name) or _wrong_build(use, state, lock, wheel.name):
            wrong.append(Change(wheel.name, version, wheel.version))
    changes = tuple(wrong)
    return _checked(HostPlan(state, "repair" if changes else "none", lock=lock, changes=changes), use)


def _same(found: str, wanted: str, name: str) -> bool:
    if name == "torch":  # see _wrong_build
        found, wanted = found.partition("+")[0], wanted.partition("+")[0]
    try:
        return Version(found) == Version(wanted)
    except InvalidVersion:
        return found == wanted


def _wrong_build(use: _Use, state: HostState, lock: WheelLock, name: str) -> bool:
    """Whether the package ``name`` is torch, built for another CUDA version than that in ``lock`` or without CUDA.

    False for nodes that use no CUDA devices.
    """
    assert state.installed is not None
    if name != "torch" or not use.devices:
        return False
    found, build = state.installed.cuda, lock.target.build
    return found.split(".")[0] != lock.cuda or bool(build and lock.cuda and f"cu{found.replace('.', '')}" != build)


def _checked(plan: HostPlan, use: _Use) -> HostPlan:
    """Return the plan or, if the host cannot install or use the packages, a plan ``refused`` that says why."""
    state, lock = plan.state, plan.lock
    assert lock is not None
    oldest = OLDEST_DRIVER.get(lock.cuda, 0)
    if plan.changes and use.driver and int(use.driver.split(".")[0]) < oldest:
        why = (
            f"driver {use.driver} is too old for CUDA {lock.cuda} of this torch, which needs {oldest} or newer; "
            "update it, or choose a build with --torch, such as --torch cu126"
        )
        return HostPlan(state, "refused", why)
    if plan.changes and state.installed and state.installed.kind == "python":
        why = f"{state.installed.prefix} belongs to the system; set `venv: {OWN_VENV}` (in `defaults`, for all nodes)"
        return HostPlan(state, "refused", why)
    if plan.changes and state.in_use:
        more = f" and {len(state.in_use) - 1} more" if len(state.in_use) > 1 else ""
        why = f"{state.environment} is in use by {state.in_use[0]}{more}; end that first, or name another `venv`"
        return HostPlan(state, "refused", why)
    return plan
