"""The plan as far as it can be known without a connection: what ``--dry-run`` shows."""

from __future__ import annotations

from pathlib import Path

from launcher.config.roles import ServingCluster, Standing
from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.plan.build import LaunchPlan, make_plan
from launcher.plan.codefiles import code_digest
from launcher.plan.manifest import read_partition_files
from launcher.plan.partition import outdated
from launcher.plan.trainable import check_train_seeds


def offline_plan(
    config: ClusterConfig,
    run_id: str,
    own_command: tuple[str, ...] = (),
    *,
    serve_only: bool = False,
    standing: Standing | None = None,
    serving: ServingCluster | None = None,
    to_train: bool = False,
) -> LaunchPlan:
    """The plan before preflight; parts that are here and current are part of it. Options as of ``make_plan``.

    ``to_train``: what runs is known, so parts that the bundled trainer cannot train on are refused (UsageError).
    """
    _source_is_here(config)
    manifest = None
    if config.makes_parts and not outdated(config):
        manifest = read_partition_files(Path(config.data.folder).expanduser())
    if to_train and manifest is not None and not own_command:
        check_train_seeds(config, manifest)
    return make_plan(
        config,
        run_id=run_id,
        code_digest=code_digest(),
        own_command=own_command,
        manifest=manifest,
        serve_only=serve_only,
        standing=standing,
        serving=serving,
    )


def _source_is_here(config: ClusterConfig) -> None:
    """In mode sync the graph is cut on this machine."""
    source = config.data.source
    if config.makes_parts and config.data.dataset == "file" and source and not Path(source).expanduser().exists():
        raise UsageError(f"data.source: {source} does not exist on this machine, where the graph is partitioned")
