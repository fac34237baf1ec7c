"""Preflight checks of work folder, disk, memory, /tmp, /dev/shm, partition folder and gnnfleet's code."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.roles import clients, gateways, serves
from launcher.config.schema import ClusterConfig
from launcher.node.exit_description import size
from launcher.preflight.finding import Finding
from launcher.preflight.survey import GraphSize, Survey
from trainer.core.remote_settings import CacheSize

_MB = 10**6

# Private memory of gnnfleet's processes on a tiny graph, in bytes, measured with torch 2.13.0+cpu, Python 3.11, x86_64:
_SUPERVISOR = 20 * _MB  #: supervisor, with watch.py

_RUNNER = 10 * _MB  # runner of one rank

_SERVER = 60 * _MB  #: graph server

_RANK = 260 * _MB  #: one rank of the bundled trainer


def base_memory(config: ClusterConfig, node_rank: int, own_command: bool) -> int:
    """Return the minimum memory of a node's processes in bytes.

    Ranks of a user's own command count as 0, as their memory is unknown.
    """
    node = config.nodes[node_rank]
    ranks = (_RUNNER + (0 if own_command else _RANK)) * node.nproc if node.trains else 0
    return _SUPERVISOR + (_SERVER if serves(config, node_rank) else 0) + ranks


def batch_memory(config: ClusterConfig, node_rank: int, graph: GraphSize | None, cpus: int) -> int:
    """Return the maximum memory of a node's batches in bytes. ``cpus``: number of CPUs of the node.

    Ranks prefetch batches; a graph server samples and buffers batches for clients.
    """
    # prefetch includes the batch in use; + 1 is a reserve
    alive = max(config.train.prefetch, config.train.sampler_threads + 1) + 1
    found = _batch(config, graph) * alive * config.nodes[node_rank].nproc
    if clients(config) and node_rank in gateways(config):
        threads = cpus if config.run.server_threads == "auto" else config.run.server_threads
        found += config.run.server_buffer * _MB + _batch(config, graph) * threads
    return found


def cache_memory(survey: Survey, node_rank: int) -> int:
    """Return the size in bytes of a node's row cache (``data.cache``), which is in files of its run folder."""
    config, graph, parts = survey.config, survey.graph, survey.parts_held[node_rank]
    if graph is None or not parts or not config.nodes[node_rank].trains:
        return 0
    remote = graph.nodes * (1 - parts / config.num_parts)
    return CacheSize.parse(config.data.cache).of_rows(remote, graph.row_bytes)


def _batch(config: ClusterConfig, graph: GraphSize | None) -> int:
    """Return the bytes of one rank's largest batch, in which all vertices differ; 0 if the graph is unknown."""
    if graph is None or not config.world_size:
        return 0
    seeds = -(-config.train.batch_size // config.world_size)
    # The maximum number of vertices sampled for one seed; a fanout of -1 counts as all vertices.
    total = width = 1
    for fanout in config.train.fanouts:
        width *= fanout if fanout > 0 else 1 << 40
        total += width
    return round(min(graph.nodes, seeds * total) * graph.row_bytes)


_LOGS = 200 * 10**6  # bytes for logs and checkpoints of a small run

_FEW_FILES = 1000  # free inodes below which a warning is given

_SHM_PER_PROCESS = 64 << 20  # bytes; NCCL's buffers between two processes on one machine


def storage_findings(survey: Survey, k: int) -> Iterator[Finding]:
    node, probe, data = survey.config.nodes[k], survey.probes[k], survey.config.data
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
        message = f"{base} is mounted noexec: python can run scripts there, but executables cannot be started"
        remedy = "set `workdir` to another disk if your command starts an executable from it"
        yield survey.finding(k, "warn", "workdir", message, remedy)
    else:
        yield survey.finding(k, "ok", "workdir", "work folder can be written")
    yield from _disk(survey, k)
    yield from _memory(survey, k)
    if full := probe["tmp"]["error"]:
        message = f"cannot write in /tmp, which tmux and leases need: {full}"
        yield survey.finding(k, "block", "tmp", message, "make room in /tmp, or `sudo chmod 1777 /tmp`")

    # NCCL uses /dev/shm between processes on one machine; Docker's default is 64 MB.
    devices = sum(len(survey.config.nodes[j].devices) for j in survey.same_machine(k))
    needed, free = devices * _SHM_PER_PROCESS, probe["shm"]["free"]
    if devices > 1 and node.devices and free < needed:
        message = f"{size(free)} free at /dev/shm, where NCCL may need {size(needed)} for {devices} processes"
        yield survey.finding(k, "warn", "shared memory", message, "start the container with `--shm-size 1g` or more")

    if data.mode == "verify" and node.holds and probe["manifest"]:
        yield survey.finding(k, "ok", "data", "partition folder found")
    elif data.mode == "verify" and node.holds:
        remedy = (
            "run `gnnfleet partition make --config FILE` where that folder is mounted, "
            "correct `data.folder` or the node's `data_folder`, or use `data.mode: sync`"
        )
        message = f"no partitioned graph: no manifest.json in {node.data_folder or data.folder}"
        yield survey.finding(k, "block", "data", message, remedy)
    if survey.code_digest:
        state = "is on the host" if probe["code"] else "will be sent at launch"
        yield survey.finding(k, "ok", "code", f"gnnfleet's code {survey.code_digest[:8]} {state}")


def _disk(survey: Survey, k: int) -> Iterator[Finding]:
    probe = survey.probes[k]
    disk, base = probe["disk"], probe["workdir_base"]
    sharing = [j for j in survey.same_machine(k) if survey.probes[j]["disk"]["device"] == disk["device"]]
    needed = sum(max(0, survey.bytes_needed.get(j, 0) - survey.probes[j]["stored"]) for j in sharing)
    needed += sum(0 if survey.own_command else cache_memory(survey, j) for j in sharing)
    others = f" by {len(sharing)} nodes on this host" if len(sharing) > 1 else ""
    message = f"{size(needed)} needed at {base}{others}, {size(disk['free'])} free"
    remedy = "make room, or set `workdir` to another disk"
    if needed > disk["free"]:
        yield survey.finding(k, "block", "disk", message, remedy)
    elif disk["files"] == 0:
        yield survey.finding(k, "block", "disk", f"no more files can be created at {base} (no inodes left)", remedy)
    elif needed + _LOGS > disk["free"] or 0 <= disk["files"] < _FEW_FILES:
        words = f"{message}: little is left for logs and checkpoints"
        yield survey.finding(k, "warn", "disk", words, remedy)
    else:
        yield survey.finding(k, "ok", "disk", f"{size(needed)} needed and free" if needed else "nothing large to store")


def _memory(survey: Survey, k: int) -> Iterator[Finding]:
    # Parts and cached rows are memory-mapped files: if they exceed memory, training is slower but does not fail.
    probe, sharing, own = survey.probes[k], survey.same_machine(k), survey.own_command
    least = sum(base_memory(survey.config, j, own) for j in sharing)
    graph = None if own else survey.graph
    likely = least + sum(batch_memory(survey.config, j, graph, survey.probes[j]["cpus"]) for j in sharing)
    parts = sum(survey.bytes_needed.get(j, 0) + cache_memory(survey, j) for j in sharing)
    limit, free = probe["memory_limit"], probe["memory_free"]
    whose = f" by {len(sharing)} nodes on this host" if len(sharing) > 1 else ""
    fewer = "fewer `procs`, a smaller train.batch_size or another machine"
    if not survey.config.nodes[k].trains:
        fewer = "a smaller run.server_buffer, fewer run.server_threads or another machine"
    if least > limit:
        message = f"at least {size(least)} of memory needed{whose}, the limit is {size(limit)}"
        yield survey.finding(k, "block", "memory", message, f"use {fewer}", code="memory-short")
    elif likely > free:
        message = f"up to {size(likely)} of memory needed{whose}, {size(free)} free"
        yield survey.finding(k, "warn", "memory", message, f"end other processes, or use {fewer}")
    elif likely + parts > limit:
        message = f"parts of {size(parts)} and the processes do not fit into {size(limit)} of memory"
        yield survey.finding(k, "warn", "memory", message, "no action needed: parts are read from disk, more slowly")
    else:
        yield survey.finding(k, "ok", "memory", "enough memory")
