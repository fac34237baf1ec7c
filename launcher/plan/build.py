"""Builds the plan of a run from its config and the facts about its nodes.

``make_plan`` is deterministic and opens no connection; ``final_plan`` adds the content of files made at launch.
"""

from __future__ import annotations

import json
import os
import secrets
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from launcher.command import Secret
from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import ServingCluster, lead
from launcher.config.schema import login_text
from launcher.errors import UsageError
from launcher.hostlist import fold
from launcher.plan.commands import PlanContext, own_argv, with_commands
from launcher.plan.files import code_digest as own_code_digest
from launcher.plan.files import node_files, shared_files
from launcher.plan.model import LaunchPlan, NodeFacts, NodePlan, PlannedFile, copied, generated
from launcher.plan.partition import PartitionFiles, outdated, partitioning, read_partition_files
from launcher.plan.placement import place_nodes
from launcher.plan.serialize import run_json
from launcher.plan.topology import decide
from launcher.plan.trainable import check_model_class, check_trainable
from launcher.text import count, spans

_LISTED = 4  # number of hosts or servers that the notes list one by one


def make_plan(
    config: ResolvedConfig,
    *,
    run_id: str,
    code_digest: str = "",
    facts: Mapping[int, NodeFacts] | None = None,
    own_command: tuple[str, ...] = (),
    manifest: PartitionFiles | None = None,
    token: Secret | None = None,
    operator: str = "",
    cwd: Path = Path(),
    before: LaunchPlan | None = None,
    serving: ServingCluster | None = None,
    queued_at: float = 0.0,
    wait_limit: float = 0.0,
) -> LaunchPlan:
    """Build the plan of a run, without the contents of ``run.json`` and the service key.

    Args:
        run_id: id of the run.
        code_digest: digest of gnnfleet's code; computed if ''.
        facts: facts that preflight found, by node_rank; None before preflight.
        own_command: a user's command to run instead of the bundled trainer; () for the trainer.
        manifest: files of the parts on the launching machine (mode ``sync``); None if the parts do not exist yet.
        token: random text by which the processes of the run are recognised (``new_token``); None for no token.
        operator: user and machine that launch, as ``alice@laptop``; stored in the leases on devices and ports.
        cwd: folder to which relative paths in ``own_command``, ``run.runs_dir``, ``train.resume`` and ``train.start``
            refer.
        before: present plan of a serving cluster; its nodes without facts run already, and keep their NodePlan.
        serving: the serving cluster to which a config with ``data.serving`` attaches.
        queued_at, wait_limit: of ``NodeSpec``.

    Raises UsageError if a file named in ``own_command`` or in the config does not exist.
    """
    facts, code_digest = facts or {}, code_digest or own_code_digest()
    facts_known = all(k in facts for k in range(len(config.nodes)))
    # The parts that the launching machine sends.
    parts = manifest if manifest and config.makes_parts and manifest.num_parts == config.num_parts else None
    if config.data.serving:
        parts_known = serving is not None
    else:
        parts_known = parts is not None or not config.makes_parts

    # The files of the user's command, or of his model class, and the checkpoint.
    own = model = None
    if own_command:
        from launcher.plan.own_script import own_command_files

        own = own_command_files(own_command, config.run.files, cwd)
    elif not config.serve_only and ":" in config.train.model:
        from launcher.plan.own_script import own_model_files

        model = own_model_files(config, cwd)
    running = {node.node_rank: node for node in before.nodes if node.node_rank not in facts} if before else {}
    nodes = place_nodes(config, run_id, facts, code_digest, parts, serving, running, own is not None)
    resumed = config.train.resume if not config.serve_only else None
    started = config.train.start if resumed is None and not (own or config.serve_only) else None
    checkpoint = _checkpoint_file("resume", resumed, config, cwd, own is None) if resumed is not None else None
    tracked: tuple[PlannedFile, ...] = ()
    if config.train.track and checkpoint:
        from launcher.plan.tracking import earlier_files

        tracked = earlier_files(checkpoint.source)
    context = PlanContext(
        config=config,
        facts=facts,
        run_id=run_id,
        token=token or Secret(),
        operator=operator,
        nodes=nodes,
        lead=lead(config),
        own=own,
        model=model,
        resume=checkpoint,
        tracked=tracked,
        start=_checkpoint_file("start", started.checkpoint, config, cwd, True) if started is not None else None,
        serving=serving,
        version=before.version + 1 if before else 1,
        topology=decide(config, nodes, config.num_parts, parts, facts),
        queued_at=queued_at,
        wait_limit=wait_limit,
    )

    # The commands and the files of each node.
    shared, planned = shared_files(context), []
    for k, node in enumerate(nodes):
        if k not in running:
            node = with_commands(context, node)
            replicated = parts is not None and context.topology.replicated and bool(node.parts)
            node = replace(
                node,
                files=node_files(context, node, shared, parts),
                topology_bytes=parts.topology_bytes_except(node.parts) if parts and replicated else 0,
            )
        planned.append(node)
    nodes = tuple(planned)

    bundled = own is None and not config.serve_only
    precision: Iterable[str] = ()
    if bundled and config.train.precision == "bfloat16":
        from launcher.plan.precision import precision_notes

        precision = precision_notes(config, facts)
    sampling = ""
    if bundled and any(node.devices for node in nodes):
        from launcher.plan.device_sampling import sampling_line

        sampling = sampling_line(config, nodes, context.topology, parts, facts)
    return LaunchPlan(
        run_id=run_id,
        name=config.name,
        world_size=context.world.size,
        num_parts=context.num_parts,
        master_addr=context.world.master_addr,
        master_port=nodes[context.lead].master_port,
        nodes=nodes,
        partition=partitioning(config) if config.makes_parts else None,
        runs_dir=config.run.runs_dir,
        code_digest=code_digest,
        final=facts_known and parts_known,
        notes=(*_notes(config, serving, facts_known, parts, manifest), *(own.notes if own else ()), *precision),
        control_port=nodes[context.lead].control_port or None,
        lead=context.lead,
        serving=config.data.serving or "",
        version=context.version,
        topology=context.topology,
        sampling=sampling,
        dataset=config.data.dataset,
        encrypted=context.encrypted,
        own_command=tuple(own_argv(own, nodes[context.lead])) if own else (),
        train=config.train if bundled else None,
        manifest=parts.files[-1].sha256 if parts else "",
        code=shared.code,
    )


def new_token() -> Secret:
    return Secret(secrets.token_hex(16))


def final_plan(plan: LaunchPlan, service_key: Secret | None = None) -> LaunchPlan:
    """Complete a plan that is carried out, with the content of ``run.json`` and of the service key.

    ``service_key``: text of an existing key file of the graph service; None to create a key pair.
    """
    contents = {"run.json": run_json(plan)}
    if plan.encrypted:
        from launcher.plan.service_key import new_key_pair

        contents["service.key"] = service_key or Secret(json.dumps(new_key_pair()))

    def complete(node: NodePlan, file: PlannedFile) -> PlannedFile:
        content = contents.get(file.dest.removeprefix(f"{node.run_dir}/"))
        return file if content is None else generated(file.dest, content, mode=file.mode, secret=file.secret)

    nodes = (replace(node, files=tuple(complete(node, file) for file in node.files)) for node in plan.nodes)
    return replace(plan, nodes=tuple(nodes))


def _checkpoint_file(name: str, wanted: str, config: ResolvedConfig, cwd: Path, ours: bool) -> PlannedFile:
    """Return the checkpoint for ``train.resume`` or ``train.start``, as ``name``.pt in the run folder.

    ``wanted``: its path, or the id of a run. ``ours``: the bundled trainer reads it; a script may save in any format.
    Raises UsageError if it does not exist, or the bundled trainer surely cannot read it, and OSError.
    """
    of_run = cwd / config.run.runs_dir / wanted / "checkpoints" / "last.pt"
    for path in (cwd / wanted, of_run):
        if path.is_file():
            checkpoint = copied(f"{name}.pt", path)  # first, as is_zipfile hides why a file cannot be read
            if ours and not zipfile.is_zipfile(path):  # torch.save writes one; its last bytes are its directory
                raise UsageError(f"train.{name}: `{path}` is no checkpoint, or not a whole one")
            return checkpoint
    raise UsageError(f"train.{name}: there is no file `{wanted}`, and no run with this id has a checkpoint ({of_run})")


def _notes(
    config: ResolvedConfig,
    serving: ServingCluster | None,
    facts_known: bool,
    parts: PartitionFiles | None,
    found: PartitionFiles | None,
) -> list[str]:
    """Return the notes of a plan. ``found``: the parts on this machine; ``parts``: these, if they are sent."""
    data = config.data
    notes = [config.left_out] if config.left_out else []
    if data.serving and serving is None:
        notes.append(f"the servers of `{data.serving}`, and their keys, are looked up at launch")
    if serving:
        listed = serving.servers[:_LISTED] if len(serving.servers) > _LISTED + 1 else serving.servers
        for one in listed:
            held = f"{'part' if len(one.parts) == 1 else 'parts'} {spans(one.parts)}"
            notes.append(f"{serving.label(one)} serves {held} at {one.endpoint}")
        if more := len(serving.servers) - len(listed):
            notes.append(f"and {more} more servers of {serving.name}")
    if not facts_known:
        notes.append(
            "preflight will fill in addresses, network interfaces, free ports (chosen at random from several, of "
            "which the first are shown), home folders for ~, absolute interpreter paths, and OMP_NUM_THREADS (cpus / "
            "processes)"
        )
    if parts is None and config.makes_parts:
        how = f"read from {data.store}, or made and uploaded there," if data.store else "made"
        notes.append(f"the parts will be {how} at launch; their files, sizes and digests are not known yet")
        if found:
            notes.append(f"{data.folder} has {found.num_parts} parts, but the config needs {config.num_parts}")

    # Hosts with several nodes: overlapping host ranges in the config may be the cause.
    if config.local:
        return notes
    nodes: dict[str, list[str]] = {}
    for k, node in enumerate(config.nodes):
        nodes.setdefault(login_text(None, node.host, node.port), []).append(f"node{k}")
    shared = {host: ranks for host, ranks in nodes.items() if len(ranks) > 1}
    if len(shared) > _LISTED:
        return [*notes, f"{count(len(shared), 'host')} run more than one node each: {fold(shared, _LISTED)}"]
    return [*notes, *(f"host {host} runs {count(len(ranks), 'node')}: {fold(ranks)}" for host, ranks in shared.items())]


def offline_plan(
    config: ResolvedConfig,
    run_id: str,
    own_command: tuple[str, ...] = (),
    *,
    serving: ServingCluster | None = None,
    to_train: bool = False,
) -> LaunchPlan:
    """Build a plan without connecting to a node. The plan lists the parts' files if they are up to date on this
    machine.

    Arguments as in ``make_plan``. ``to_train``: whether to raise UsageError if the bundled trainer would refuse the
    graph (``check_trainable``) or the user's model class (``check_model_class``).
    """
    if config.data.store is None:  # else the parts may exist there
        check_source(config)
    manifest = None
    if config.makes_parts and not outdated(config):
        manifest = read_partition_files(Path(config.data.folder).expanduser())
    if to_train and not own_command:
        check_trainable(config, manifest)
        check_model_class(config.train, manifest)
    return make_plan(config, run_id=run_id, own_command=own_command, manifest=manifest, serving=serving)


def check_source(config: ResolvedConfig) -> None:
    """Raise UsageError if the files from which the graph is partitioned do not exist on this machine."""
    source = config.data.source
    read_here = config.makes_parts and config.data.dataset in ("file", "tables", "partition")
    if read_here and source and not os.path.exists(os.path.expanduser(source)):
        raise UsageError(f"data.source: {source} does not exist on this machine, where the graph is partitioned")
