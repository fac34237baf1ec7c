"""Commands that read what a run leaves on this machine: ``infer`` and ``inspect``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import run_ids
from launcher.cli.options import GroupedOptions, examples, with_options
from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.report.run_folder import FoundRun

_RUN = (
    click.argument("run", required=False, shell_complete=run_ids),
    click.option("--parts", type=click.Path(path_type=Path), help="Partition folder; default: that of the run."),
    click.option("--runs-dir", metavar="DIR", help="Local folder of runs; default: runs."),
)


@click.command(
    cls=GroupedOptions,
    context_settings={"ignore_unknown_options": True},
    epilog=examples("infer toy-2026", "infer toy-2026 --probabilities --out predictions"),
)
@with_options(*_RUN)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the results; default: RUN/predictions.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def infer(ctx: click.Context, out: Path | None, words: Sequence[str], **values: Any) -> None:
    """Compute the predictions of a run's model for all nodes, on this machine.

    RUN is a run id, a part of one, or a run folder; default: the newest run. The checkpoint and the parts are those of
    the run. OUT/predictions.csv has a row per node. Other words are passed to `python -m trainer infer`, whose --help
    lists its options, such as --probabilities, --top-k and --parquet.
    """
    from launcher.plan.partition import local_trainer, run_trainer

    if (values["run"] or "").startswith("-"):  # an option for the trainer, without a run before it
        words, values["run"] = (values["run"], *words), None
    found = _found(ctx, values)
    assert found.folder is not None
    if found.own:
        raise UsageError(
            f"run {found.run_id} trained a script of yours; infer needs a model of the bundled trainer "
            "(for your own: gf.nn.inference, examples/full_inference.py)"
        )
    checkpoint = found.folder / "checkpoints" / "last.pt"
    if not checkpoint.is_file():
        collect = f"if it saved one, `gnnfleet collect {found.words}` fetches it"
        raise UsageError(f"run {found.run_id} has no {checkpoint}; {collect}")
    parts, out = _parts(found, values["parts"]), out or found.folder / "predictions"
    files = ("--checkpoint", str(checkpoint), "--parts", str(parts), "--out", str(out))
    ctx.exit(run_trainer(local_trainer("infer", *files, *words)))


@click.command(cls=GroupedOptions, epilog=examples("inspect toy-2026"))
@with_options(*_RUN)
@click.pass_context
def inspect(ctx: click.Context, **values: Any) -> None:
    """Describe the parts of a run: types, sizes, attributes, splits and edge cut.

    RUN is a run id, a part of one, or a run folder; default: the newest run. `partition inspect FOLDER` describes any
    partition folder.
    """
    from launcher.plan.partition import local_trainer, run_trainer

    ctx.exit(run_trainer(local_trainer("partition", "inspect", str(_parts(_found(ctx, values), values["parts"])))))


def _found(ctx: click.Context, values: Mapping[str, Any]) -> FoundRun:
    from launcher.manage.select import Choice
    from launcher.report.run_history import find_run

    runs_dir = values["runs_dir"] or (ctx.obj or {}).get("runs_dir")
    return find_run(values["run"], Choice(values["run"], None, (), runs_dir).runs_dirs)


def _parts(found: FoundRun, given: Path | None) -> Path:
    """Return the partition folder of a run on this machine. Raises UsageError if its parts are not there."""
    if given is not None:
        return given
    data, launch = found.needed_config.data, found.launch
    folder = Path(launch.cwd if launch else "", Path(data.folder).expanduser())
    if (folder / "manifest.json").is_file():
        return folder
    if data.store:
        fetch = f"gnnfleet partition fetch {shlex.quote(data.store)} parts"
        raise UsageError(
            f"the parts of run {found.run_id} are in {data.store}; `{fetch}` fetches them; then --parts parts"
        )
    raise UsageError(
        f"the parts of run {found.run_id} are not on this machine ({folder} has no manifest.json); give their folder "
        "with --parts, or compute on the hosts (docs/first_cluster.md, Predictions of all nodes)"
    )
