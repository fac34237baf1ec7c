"""Takes the nodes of a config with ``transport: slurm`` from the allocation of a Slurm job.

Inside of an allocation the hosts are those of SLURM_JOB_NODELIST. Outside, before a job is submitted, they are
placeholders, so that the config can be checked and planned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.errors import Problem
from launcher.hostlist import RangeError, expand, split_list
from launcher.yaml_tree import Origin, Report, Scalar, Section, Tree, YamlSequence, describe, expand_nodes, is_count

_NOT_IN_JOB = (
    "transport: slurm needs the nodes of a job: launch inside salloc or sbatch, or submit a job with --slurm nodes=4 "
    "(or `slurm: {nodes: 4}`)"
)

_UUIDS_OF_ONE_HOST = (
    "CUDA_VISIBLE_DEVICES names the GPUs of this host by UUID, which no other host of the job has; "
    "list `devices` of each entry of nodes (`nvidia-smi -L` shows them)"
)

_UUID = re.compile(r"(GPU|MIG)-\S")


def _devices(environ: Mapping[str, str]) -> tuple[int | str, ...]:
    """Return the GPUs of the job as processes on this node name them.

    These are the entries of CUDA_VISIBLE_DEVICES if it lists UUIDs (of GPUs or MIG instances), or as many ids as the
    job has GPUs on this node, else 0, 1, ….
    """
    if not environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return ()
    number = int(environ["SLURM_GPUS_ON_NODE"])
    visible = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(map(_UUID.match, visible)):
        return tuple(visible)
    if len(visible) == number and all(word.isdecimal() for word in visible):
        return tuple(map(int, visible))
    return tuple(range(number))


def with_allocation(tree: Section, origin: Origin, environ: Mapping[str, str], report: Report) -> Section:
    """Return the config ``tree`` with the nodes of the allocation. ``origin``: place of its ``transport: slurm``.

    ``nodes`` may be absent (all hosts are used), the number of hosts to use, or a list. Entry k of the list has the
    settings of host k except its name; the last entry also applies to all further hosts. ``slurm_job`` is set to the
    job of the allocation. A tree that has ``slurm_job`` already, as in the run folder of an earlier launch, is returned
    unchanged.
    """
    job = tree.items.get("slurm_job")
    if isinstance(job, Scalar) and not job.empty:
        return tree
    nodes = tree.items.get("nodes", Scalar(origin, "", "null"))
    job_id, of_job = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    found: tuple[str, ...] | None = None  # hosts of the job of this process; None outside of a job
    listed, problem = nodes, None
    try:
        if job_id and of_job:  # such as gpu[01-03,07],login
            found = tuple(host for word in split_list(of_job) for host in expand(word))
        listed = nodes if is_count(nodes) else expand_nodes(nodes)
    except RangeError as error:
        problem = Problem(origin.file, origin.line, f"SLURM_JOB_NODELIST or nodes: {error}")
    wanted = int(nodes.text) if isinstance(nodes, Scalar) and is_count(nodes) and len(nodes.text) < 6 else 0
    options = tree.items.get("slurm")
    number = options.items.get("nodes") if isinstance(options, Section) else None
    if found is not None:
        hosts = found
    else:
        # A placeholder for each node of the future job; none if their number is unknown.
        places = wanted or (len(listed.items) if isinstance(listed, YamlSequence) else 0)
        if isinstance(number, Scalar) and number.text.isdecimal() and len(number.text) < 6:
            places = int(number.text)
        hosts = tuple(f"slurm-node{k}" for k in range(places))
    if not hosts and problem is None:
        problem = Problem(origin.file, origin.line, _NOT_IN_JOB)
        if isinstance(number, Scalar) and not number.empty:
            words = f"slurm.nodes: expected a whole number of at least 1, found {describe(number)}"
            problem = Problem(number.origin.file, number.origin.line, words)
    if wanted > len(hosts) and problem is None:
        text = f"nodes: {wanted} wanted, but the job has {len(hosts)}"
        problem = Problem(nodes.origin.file, nodes.origin.line, text)
    if problem is not None:
        report(problem)
        hosts, wanted = ("unknown",), 0

    # An entry per host, with the host's name, the settings of its entry in the list, and the GPUs of the job.
    defaults = tree.items.get("defaults")
    given = isinstance(defaults, Section) and bool({"devices", "procs"} & defaults.items.keys())
    devices = _devices(environ) if found is not None and not given else ()
    in_list = [one for one in listed.items if isinstance(one, Section)] if isinstance(listed, YamlSequence) else []
    entries = []
    for k, host in enumerate(hosts[: wanted or None]):
        own = in_list[min(k, len(in_list) - 1)] if in_list else Section(origin, {}, {})
        of_node: dict[str, Tree] = {**own.items, "host": Scalar(origin, host, "str")}
        if devices and not {"devices", "procs"} & own.items.keys():
            ids = (Scalar(origin, str(one), "int" if isinstance(one, int) else "str") for one in devices)
            of_node["devices"] = YamlSequence(origin, tuple(ids))
        entries.append(Section(own.origin, of_node, own.keys))
    taken = [entry for entry in entries if entry.items.get("devices", tree).origin is origin]
    if len(entries) > 1 and taken and isinstance(devices[0], str):
        report(Problem(origin.file, origin.line, _UUIDS_OF_ONE_HOST))
    items: dict[str, Tree] = {**tree.items, "nodes": YamlSequence(nodes.origin, tuple(entries))}
    keys = {**tree.keys, "nodes": tree.keys.get("nodes", origin)}
    if found is not None:
        items["slurm_job"] = Scalar(origin, str(job_id), "str", plain=False)
        keys["slurm_job"] = origin
    return Section(tree.origin, items, keys)
