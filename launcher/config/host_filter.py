"""Restricts a config to some of its hosts or devices (``--include`` and ``--exclude``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import shorten

from launcher.config.roles import lead
from launcher.config.schema import ClusterConfig, NodeConfig, login_text
from launcher.errors import UsageError
from launcher.hostlist import RangeError, expand, fold, split_list

_DEVICES = re.compile(r"(.+):([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)")

_MORE_DEVICES = re.compile(r"[0-9]+(?:-[0-9]+)?(?:@.*)?")

_LABEL = re.compile(r"node[0-9]+")

_ADDRESS = re.compile(r"[0-9.]+|.*:.*")


def filtered(config: ClusterConfig, include: Sequence[str], exclude: Sequence[str]) -> ClusterConfig:
    """Return ``config`` with only the included nodes and devices (default: all), minus the excluded ones.

    Nodes keep their order and get new node ranks; the lead node is the first remaining node that trains. ``procs``
    becomes the number of remaining devices, and the default of ``num_parts`` the number of remaining nodes that hold
    parts. If that is another number, these parts go to a folder of their own, so that those of all nodes remain.
    Raises UsageError if a name matches no node or device, or no node remains.
    """
    if not include and not exclude:
        return config
    kept = _chosen(config, include, "--include") if include else dict.fromkeys(range(len(config.nodes)))
    dropped = _chosen(config, exclude, "--exclude")
    nodes = [_rest(node, kept[k], k in dropped, dropped.get(k)) for k, node in enumerate(config.nodes) if k in kept]
    left = tuple(node for node in nodes if node is not None)
    if not left:
        options = [*(f"--include {spec}" for spec in include), *(f"--exclude {spec}" for spec in exclude)]
        raise UsageError(f"{' '.join(options)}: no host is left of {_hosts(config)}")
    return with_nodes(config, left)


def with_nodes(config: ClusterConfig, left: Sequence[NodeConfig]) -> ClusterConfig:
    """Return ``config`` with only the nodes ``left``, and their parts in a folder of their own, as in ``filtered``."""
    first, master = config.nodes[lead(config)], config.run.master_addr
    gone = first.host not in (node.host for node in left)
    after = replace(config, nodes=tuple(left))
    if gone and master in (first.host, first.address) and after.world_size:
        now = lead(after)
        raise UsageError(
            f"run.master_addr is {master}, but {first.host} is excluded; "
            f"give --master-addr {left[now].address or 'auto'}, as the lead node is now {left[now].host} (node{now})"
        )
    data, parts = config.data, sum(node.holds for node in left)
    if data.mode == "sync" and data.num_parts is None and parts != sum(node.holds for node in config.nodes):
        data = replace(data, folder=f"{data.folder.rstrip('/')}-{parts}")
    return replace(config, nodes=tuple(left), data=data)


def _rest(
    node: NodeConfig, kept: frozenset[int] | None, dropped: bool, removed: frozenset[int] | None
) -> NodeConfig | None:
    """Return the node with its remaining devices; None if none remains.

    ``kept``: ids of the included devices; None: all. ``dropped``: whether ``--exclude`` names the node or some of its
    devices. If so, ``removed`` has the ids of the excluded devices, or is None for the whole node.
    """
    if dropped and removed is None:
        return None
    devices = tuple(d for d in node.devices if (kept is None or d in kept) and d not in (removed or ()))
    if devices == node.devices:
        return node
    return replace(node, devices=devices, procs=node.procs and len(devices)) if devices else None


def _chosen(config: ClusterConfig, specs: Sequence[str], option: str) -> dict[int, frozenset[int] | None]:
    """Return the device ids that ``specs`` select by node_rank, None for a whole node. Raises UsageError."""
    found: dict[int, frozenset[int] | None] = {}
    names = _Names(config)
    for spec in specs:
        try:
            for k, devices in (one for name in _listed(spec) for one in _named(config, names, name)):
                before = found.get(k, frozenset())
                found[k] = None if devices is None or before is None else before | devices
        except (RangeError, LookupError) as error:
            raise UsageError(f"{option} {spec}: {error.args[0]}") from None
    return found


def _listed(spec: str) -> Iterator[str]:
    """Split a list of hosts and device ids: ``a[1-2]:0,2,b`` yields ``a1:0,2``, ``a2:0,2`` and ``b``.

    Raises RangeError for an invalid range.
    """
    pieces: list[str] = []
    for word in split_list(spec) or [spec]:
        if pieces and _MORE_DEVICES.fullmatch(word) and ":" in pieces[-1]:
            pieces[-1] += f",{word}"
        else:
            pieces.append(word)
    for piece in pieces:
        yield from expand(piece)


def _named(config: ClusterConfig, names: _Names, name: str) -> Iterator[tuple[int, frozenset[int] | None]]:
    """Yield (node_rank, device ids) for ``name``, ``name:devices``, or several of them joined by @ as in DeepSpeed.

    The device ids are None for a whole node. Raises LookupError if a name matches no host.
    """
    devices, (first, at, more) = _DEVICES.fullmatch(name), name.partition("@")
    if ranks := names.ranks(name):
        yield from ((k, None) for k in ranks)
    elif devices and (ranks := names.ranks(devices[1])):
        yield from _with_devices(config, ranks, frozenset(map(int, expand(f"[{devices[2]}]"))))
    elif at and names.ranks(_DEVICES.sub(r"\1", first)):
        for one in (first, more):
            yield from _named(config, names, one)
    else:
        raise LookupError(f"no host is called `{name}`; the hosts are {_hosts(config)}")


def _with_devices(
    config: ClusterConfig, ranks: Sequence[int], wanted: frozenset[int]
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield each node in ``ranks`` that has some of the ``wanted`` device ids, with these ids.

    Raises LookupError if a host lacks a wanted device.
    """
    hosts: dict[str, dict[int, tuple[int | str, ...]]] = {}
    for k in ranks:
        hosts.setdefault(config.nodes[k].host, {})[k] = config.nodes[k].devices
    for host, nodes in hosts.items():
        present = sorted({device for devices in nodes.values() for device in devices}, key=str)
        if not present:
            why = "it trains on its CPU" if any(config.nodes[k].trains for k in nodes) else "it is a server"
            raise LookupError(f"{host} has no `devices` in the config; {why}")
        if missing := sorted(wanted - {*present}):
            has = f"its devices are {', '.join(map(str, present))}"
            raise LookupError(f"{host} has no device {', '.join(map(str, missing))} in the config; {has}")
        chosen = {k: frozenset(device for device in devices if device in wanted) for k, devices in nodes.items()}
        yield from ((k, kept) for k, kept in chosen.items() if kept)


class _Names:
    """Finds the node_ranks of nodes by name.

    A node's name is its host, with or without domain, user and port, or ``node3`` for node_rank 3.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.full: dict[str, list[int]] = {}
        self.short: dict[str, list[int]] = {}
        for k, node in enumerate(config.nodes):
            short = node.host if _ADDRESS.fullmatch(node.host) else node.host.partition(".")[0].lower()
            for names, host in ((self.full, node.host), (self.short, short)):
                for login in {login_text(user, host, port) for user in (None, node.user) for port in (None, node.port)}:
                    names.setdefault(login.lower(), []).append(k)
        ambiguous = any(map(_LABEL.fullmatch, self.short))  # a host called node1 need not have node_rank 1
        self.labels = {} if ambiguous else {f"node{k}": [k] for k in range(len(config.nodes))}

    def ranks(self, name: str) -> list[int]:
        """Return the node_ranks that match ``name``, which may contain the wildcards * and ?; [] for none.

        Host names take precedence over labels such as ``node3``. Without wildcards, full host names take precedence
        over short ones.
        """
        name = re.sub(r"^\[(.*:.*)\]$", r"\1", name.lower())  # an IPv6 address
        if "*" not in name and "?" not in name:
            return self.full.get(name) or self.short.get(name) or self.labels.get(name, [])
        matches = re.compile("".join({"*": ".*", "?": "."}.get(char) or re.escape(char) for char in name)).fullmatch
        hosts = {k for names in (self.full, self.short) for one, ranks in names.items() if matches(one) for k in ranks}
        return sorted(hosts) or [k for one, ranks in self.labels.items() if matches(one) for k in ranks]


def _hosts(config: ClusterConfig) -> str:
    hosts = [node.host for node in config.nodes]
    listed = shorten(fold(dict.fromkeys(hosts)), 200, placeholder=" …")
    return f"{listed} (node0 to node{len(hosts) - 1})" if len(set(hosts)) < len(hosts) else listed
