"""Findings about folders, disk, memory and data: whether what the plan needs fits."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.consistency import CacheSize
from launcher.config.roles import clients, gateways, holdings, serves
from launcher.config.schema import ClusterConfig, TrainConfig
from launcher.node.exit_description import size
from launcher.preflight.finding import Finding, GraphSize, Survey

_MB = 10**6

# Private memory of our processes on a tiny graph, measured with torch 2.13.0+cpu and Python 3.11 on x86_64:
SUPERVISOR = 20 * _MB  #: with watch.py

RUNNER = 10 * _MB  #: of each rank

SERVER = 60 * _MB  #: graph server

RANK = 260 * _MB  #: bundled trainer


def base_memory(config: ClusterConfig, node_rank: int, own_command: bool) -> int:
    """Bytes that the node's processes take at least. Of an own command nothing is known."""
    node = config.nodes[node_rank]
    ranks = (RUNNER + (0 if own_command else RANK)) * node.nproc if node.trains else 0
    return SUPERVISOR + (SERVER if serves(config, node_rank) else 0) + ranks


def batch_memory(config: ClusterConfig, node_rank: int, graph: GraphSize | None, cpus: int) -> int:
    """Bytes of batches at most: those that ranks have prepared ahead, and those that a server makes and keeps for
    clients. ``cpus``: of the node."""
    alive = max(config.train.prefetch, config.train.sampler_threads + 1) + 1  # the one in use among them; one to spare
    found = _batch(config, graph) * alive * config.nodes[node_rank].nproc
    if clients(config) and node_rank in gateways(config):
        threads = cpus if config.run.server_threads == "auto" else config.run.server_threads
        found += config.run.server_buffer * _MB + _batch(config, graph) * threads
    return found


def cache_memory(config: ClusterConfig, node_rank: int, graph: GraphSize | None) -> int:
    """Bytes of other nodes' rows that a node keeps (``data.cache``): files of its run folder that its ranks map."""
    parts = len(holdings(config)[node_rank].parts)
    if graph is None or not parts or not config.nodes[node_rank].trains:
        return 0
    remote = graph.nodes * (1 - parts / config.num_parts)
    return CacheSize.parse(config.data.cache).of_rows(remote, graph.row_bytes)


def _batch(config: ClusterConfig, graph: GraphSize | None) -> int:
    """Bytes of a rank's batch at most: as if its vertices were all different; 0 where the graph is not known."""
    if graph is None or not config.world_size:
        return 0
    seeds = -(-config.train.batch_size // config.world_size)
    return round(min(graph.nodes, seeds * _tree(config.train)) * graph.row_bytes)


def _tree(train: TrainConfig) -> int:
    """Vertices in one seed's tree; a fanout of -1 may reach all there are."""
    total = width = 1
    for fanout in train.fanouts:
        width *= fanout if fanout > 0 else 1 << 40
        total += width
    return total


_LOGS = 200 * 10**6  # bytes that logs and checkpoints of a small run take

_FEW_FILES = 1000

_SHM_PER_PROCESS = 64 << 20  # NCCL's buffers between two processes of a machine


def storage_findings(survey: Survey, k: int) -> Iterator[Finding]:
    """Of one node."""
    for check in (_workdir, _disk, _memory, _tmp, _shm, _data, _code):
        yield from check(survey, k)


def _workdir(survey: Survey, k: int) -> Iterator[Finding]:
    probe = survey.probes[k]
    error, base = probe["workdir_error"], probe["workdir_base"]
    remedies = {
        "disk quota exceeded": "make room in the quota, or set `workdir` to another disk",
        "no space left on device": "make room, or set `workdir` to another disk",
        "read-only file system": "set `workdir` to a disk that can be written",
    }
    if error:
        message = f"workdir {probe['workdir']}: cannot write in {base}: {error}"
        remedy = remedies.get(error, "set `workdir`, or change the folder's owner or mode")
        yield survey.finding(k, "block", "workdir", message, remedy)
    elif probe["noexec"] and survey.own_command:
        message = f"{base} is mounted noexec: programs of your own cannot be started there, scripts given to python can"
        yield survey.finding(k, "warn", "workdir", message, "set `workdir` to another disk if that matters")
    else:
        yield survey.finding(k, "ok", "workdir", "work folder can be written")


def _disk(survey: Survey, k: int) -> Iterator[Finding]:
    probe = survey.probes[k]
    disk, base = probe["disk"], probe["workdir_base"]
    mates = [j for j in survey.housemates(k) if survey.probes[j]["disk"]["device"] == disk["device"]]
    needed = sum(max(0, survey.bytes_needed.get(j, 0) - survey.probes[j]["stored"]) for j in mates)
    needed += sum(0 if survey.own_command else cache_memory(survey.config, j, survey.graph) for j in mates)
    others = f" by {len(mates)} nodes of this machine" if len(mates) > 1 else ""
    message = f"{size(needed)} needed at {base}{others}, {size(disk['free'])} free"
    remedy = "make room, or set `workdir` to another disk"
    if needed > disk["free"]:
        yield survey.finding(k, "block", "disk", message, remedy)
    elif disk["files"] == 0:
        yield survey.finding(k, "block", "disk", f"no more files can be made at {base} (no inodes left)", remedy)
    elif needed + _LOGS > disk["free"] or 0 <= disk["files"] < _FEW_FILES:
        words = f"{message}: little is left for logs and checkpoints"
        yield survey.finding(k, "warn", "disk", words, remedy)
    else:
        yield survey.finding(k, "ok", "disk", f"{size(needed)} needed and free" if needed else "nothing large to store")


def _memory(survey: Survey, k: int) -> Iterator[Finding]:
    """Parts and the row cache are mapped: those that do not fit are read again and again, but break nothing."""
    probe, mates, own = survey.probes[k], survey.housemates(k), survey.own_command
    least = sum(base_memory(survey.config, j, own) for j in mates)
    graph = None if own else survey.graph
    likely = least + sum(batch_memory(survey.config, j, graph, survey.probes[j]["cpus"]) for j in mates)
    parts = sum(survey.bytes_needed.get(j, 0) + cache_memory(survey.config, j, survey.graph) for j in mates)
    limit, free = probe["memory_limit"], probe["memory_free"]
    whose = f" by {len(mates)} nodes of this machine" if len(mates) > 1 else ""
    fewer = "fewer `procs`, a smaller train.batch_size or another machine"
    if not survey.config.nodes[k].trains:
        fewer = "a smaller run.server_buffer, fewer run.server_threads or another machine"
    if least > limit:
        message = f"at least {size(least)} of memory needed{whose}, {size(limit)} there"
        yield survey.finding(k, "block", "memory", message, f"take {fewer}")
    elif likely > free:
        message = f"up to {size(likely)} of memory needed{whose}, {size(free)} free"
        yield survey.finding(k, "warn", "memory", message, f"end what takes the rest, or take {fewer}")
    elif likely + parts > limit:
        message = f"parts of {size(parts)} do not fit into {size(limit)} of memory beside the processes"
        yield survey.finding(k, "warn", "memory", message, "nothing to do: they are read from disk, which takes longer")
    else:
        yield survey.finding(k, "ok", "memory", "enough memory")


def _tmp(survey: Survey, k: int) -> Iterator[Finding]:
    error = survey.probes[k]["tmp"]["error"]
    if error:
        message = f"cannot write in /tmp, where tmux and leases keep their files: {error}"
        yield survey.finding(k, "block", "tmp", message, "make room there, or give it mode 1777")


def _shm(survey: Survey, k: int) -> Iterator[Finding]:
    """Processes that share a machine talk through /dev/shm with NCCL; Docker gives 64 MB."""
    devices = sum(len(survey.config.nodes[j].devices) for j in survey.housemates(k))
    needed, free = devices * _SHM_PER_PROCESS, survey.probes[k]["shm"]["free"]
    if devices > 1 and survey.config.nodes[k].devices and free < needed:
        message = f"{size(free)} free at /dev/shm, where NCCL may need {size(needed)} for {devices} processes"
        yield survey.finding(k, "warn", "shared memory", message, "start the container with `--shm-size 1g` or more")


def _data(survey: Survey, k: int) -> Iterator[Finding]:
    data = survey.config.data
    if data.mode != "verify" or not survey.config.nodes[k].holds:
        return
    folder = survey.config.nodes[k].data_folder or data.folder
    if survey.probes[k]["manifest"]:
        yield survey.finding(k, "ok", "data", "partition folder found")
    else:
        remedy = (
            "run `gnnfleet partition make --config FILE` where that folder is mounted, "
            "correct `data.folder` or the node's `data_folder`, or use `data.mode: sync`"
        )
        yield survey.finding(k, "block", "data", f"no manifest.json in {folder}", remedy)


def _code(survey: Survey, k: int) -> Iterator[Finding]:
    """Never a difference: a launch sends what is not there."""
    if survey.code_digest:
        there = "is there already" if survey.probes[k]["code"] else "is sent at launch"
        yield survey.finding(k, "ok", "code", f"our code {survey.code_digest[:8]} {there}")
