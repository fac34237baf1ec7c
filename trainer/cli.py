"""The command line ``python -m trainer``: partition, train, profile, infer, serve, inspect, verify."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

import click

from trainer.core.errors import SettingsError, TrainerError
from trainer.core.remote_settings import SERVER_WAIT, CacheSize, RemoteAccess, Topology, WireRows
from trainer.core.waits import report_error
from trainer.train.settings import F, InferJob, NumberList, TrainJob, TrainSettings, settings_options

#: Commands of other modules: name -> (module, attribute). Imported on use, because importing torch takes seconds.
_LAZY_COMMANDS = {name: ("trainer.partition.cli", name) for name in ("partition", "inspect", "verify")}

_LAZY_COMMANDS |= {"profile": ("trainer.train.profile", "profile"), "track": ("trainer.track.follow", "track")}


class _LazyGroup(click.Group):
    """A click group that imports a command of ``_LAZY_COMMANDS`` only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_LAZY_COMMANDS})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _LAZY_COMMANDS:
            return super().get_command(ctx, name)
        module, attribute = _LAZY_COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def main(argv: list[str] | None = None) -> None:
    """Run the command line.

    A ``TrainerError`` prints one ``error:`` message and exits with the error's status; any other exception prints a
    traceback. A rank first reports the error to its supervisor.
    """
    try:
        done = cli.main(args=argv, prog_name="python -m trainer", standalone_mode=False)
    except click.ClickException as error:
        shown = io.StringIO()  # click would break nothing but its usage line
        error.show(shown)
        print(_between_words(shown.getvalue().rstrip("\n")), file=sys.stderr, flush=True)
        _leave(error.exit_code)
    except click.Abort:
        print("Aborted!", file=sys.stderr, flush=True)
        _leave(1)
    except TrainerError as error:
        more = f"\nExplain: gnnfleet explain {error.code}" if error.code else ""
        print(_between_words(f"error: {error}{more}"), file=sys.stderr, flush=True)
        report_error(error)
        _leave(error.exit_status)
    except Exception as error:
        if _in_process_group():
            sys.excepthook(*sys.exc_info())
            report_error(error)
            _leave(1)
        raise
    sys.exit(done if isinstance(done, int) else 0)


def _between_words(text: str) -> str:
    """Break the lines of a message between words if stderr is a terminal, which would break them within words."""
    if not sys.stderr.isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns)
    wrap = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrap, text.split("\n")))


def _in_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())


def _leave(status: int) -> NoReturn:
    """Exit the process. If torch.distributed is initialized, skip the interpreter's shutdown."""
    # Shutdown would wait for all threads, and torch may abort while it destroys a group that has lost a rank.
    if _in_process_group():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    # torch's import takes a sixth less time without garbage collection
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _CacheSize(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> CacheSize:
        try:
            return value if isinstance(value, CacheSize) else CacheSize.parse(value)
        except SettingsError as error:
            self.fail(str(error), param, ctx)


_FOLDER = click.Path(path_type=Path)


def _run_option(flag: str, variable: str, help: str, **more: Any) -> Callable[[F], F]:
    """Make a command-line option whose value the launcher sets by the environment variable GNNFLEET_``variable``."""
    return click.option(flag, envvar=f"GNNFLEET_{variable}", help=help, **more)


def _topology(help: str) -> Callable[[F], F]:
    choice = click.Choice(get_args(Topology))
    return _run_option("--topology", "TOPOLOGY", help, type=choice, default="partitioned", show_default=True)


def _server_wait(help: str) -> Callable[[F], F]:
    at_least = click.FloatRange(min=0)
    return _run_option("--server-wait", "SERVER_WAIT", help, type=at_least, default=SERVER_WAIT, show_default=True)


_GRAPH_OPTIONS = (
    _run_option("--parts", "PARTS", "Partition folder; client nodes of a run have none.", type=_FOLDER),
    _run_option(  # click takes an empty variable for one that is not set
        "--part-ids", "PART_IDS", "Parts to open; default: all, or none if the variable GNNFLEET_PART_IDS is empty.",
        type=NumberList(), default=lambda: () if "GNNFLEET_PART_IDS" in os.environ else None,
    ),
    _run_option(
        "--cluster", "CLUSTER", "cluster.json of the run, if graph servers of other hosts have parts.", type=_FOLDER
    ),
    _run_option(
        "--key-file", "SERVICE_KEY", "service.key of the run, if the graph service is encrypted.", type=_FOLDER
    ),
    _server_wait("Seconds to wait for a lost graph server."),
    _topology("replicated: the folder has the edges of all parts, and only rows are requested from other hosts."),
    _run_option(
        "--cache", "CACHE",
        "Size of the cache for the most requested rows of other hosts: a share of them, a size (512MB), or 0.",
        type=_CacheSize(), default="10%", show_default=True,
    ),
    _run_option(
        "--wire-rows", "WIRE_ROWS", "Type that floating-point rows from other hosts are rounded to on the wire.",
        type=click.Choice(get_args(WireRows)), default="stored", show_default=True,
    ),
)  # fmt: skip

_DIGESTS = _run_option(
    "--digests/--no-digests", "DIGESTS",
    "Compare the opened files with their sha256 in the manifest, once per host.",
    default=True, show_default=True,
)  # fmt: skip

_REMOTE_ACCESS = tuple(field.name for field in fields(RemoteAccess))


def _graph_options(function: F) -> F:
    """Decorate a command with the options about opening a graph.

    The options that are fields of ``RemoteAccess`` reach ``function`` as one argument, ``remote_access``.
    """

    @functools.wraps(function)
    def with_remote_access(**options: Any) -> Any:
        remote_access = RemoteAccess(**{name: options.pop(name) for name in _REMOTE_ACCESS})
        return function(**options, remote_access=remote_access)

    for option in reversed((*_GRAPH_OPTIONS, _DIGESTS)):
        with_remote_access = option(with_remote_access)
    return cast(F, with_remote_access)


#: Option names may be written with underscores, as in a cluster file.
_NAMES = {"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]}


@click.group(cls=_LazyGroup, context_settings=_NAMES)
def cli() -> None:
    """Partition a graph, train a model on it, run inference, or serve parts to other hosts."""


@cli.command()
@_run_option(
    "--run-dir", "RUN_DIR", "Folder for metrics and checkpoints.", type=_FOLDER, default="run", show_default=True
)
@_graph_options
@settings_options
def train(
    parts: Path | None, run_dir: Path, part_ids: tuple[int, ...] | None, cluster: Path | None, key_file: Path | None,
    digests: bool, remote_access: RemoteAccess, **settings: Any,
) -> None:  # fmt: skip
    """Train a model on a partition folder. Under torchrun, this process is one rank of the run."""
    job = TrainJob(TrainSettings(**settings), parts, run_dir, part_ids, cluster, key_file, remote_access, digests)
    with _without_gc():
        from trainer.train.job import train as run

    run(job)


@cli.command("check-model")
@click.option("--parts", type=_FOLDER, help="Partition folder; default: the class is checked without a graph.")
@settings_options
def check_model(parts: Path | None, **values: Any) -> None:
    """Check that `train` can make and call a model class of your own. Takes the settings of `train`.

    With --parts, also makes the model for that graph, and runs it once on a small batch of random numbers.
    """
    settings = TrainSettings(**values)
    from trainer.own.model_class import check_class

    check_class(settings.model, settings.model_args or {})
    if parts is not None:
        from trainer.train.model import check_on_graph

        check_on_graph(settings, parts)


@cli.command()
@click.option("--checkpoint", type=_FOLDER, required=True, help="Checkpoint file; rank 0 reads it.")
@click.option("--out", type=_FOLDER, required=True, help="Folder for the results of each part.")
@_graph_options
@click.option(
    "--nodes-at-once", type=click.IntRange(min=1), default=4096, show_default=True,
    help="Number of nodes computed together; a smaller number needs less memory.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True, max=1_000_000, max_open=True), default=120.0,
    show_default=True, help="Timeout in seconds of every wait for another process.",
)  # fmt: skip
@click.option(
    "--top-k", type=click.IntRange(min=0),
    help="Task link: targets listed for each source; default: 10, or 0 if there are more than 10 billion pairs.",
)  # fmt: skip
@click.option(
    "--without-held-out", is_flag=True,
    help="Task link: list only targets that are no links of val and test either, as for use in production.",
)  # fmt: skip
@click.option(
    "--pairs", type=_FOLDER,
    help="Task link: CSV file with ids of sources and ids of targets; their scores go to OUT/pairs.csv.",
)  # fmt: skip
@click.option(
    "--parquet/--no-parquet", default=None, help="Also write predictions.parquet; default: if duckdb is installed."
)
@click.option(
    "--probabilities", is_flag=True, help="Task classification: add a column with the probability of each class."
)
@click.option(
    "--fanouts", type=NumberList(),
    help="For a model class that cannot be run layer by layer: neighbours per hop, -1: all; default: as in evaluation.",
)  # fmt: skip
def infer(**options: Any) -> None:
    """Compute a trained model's output for every node, using all neighbours.

    Under torchrun, this process is one rank. For each part, writes predictions.csv (node ids and predictions) and
    logits.npy (the model's output, one row per node; values.npy for regression) to OUT/part<p>. OUT/predictions.csv has
    the rows of all parts, unless hosts write to folders of their own. Writes the metrics on each split to
    OUT/infer.json.

    For task link, OUT/source/part<p> gets the embeddings of nodes as sources of links, and the targets with the highest
    scores for each source. OUT/target/part<p> gets the embeddings of nodes as targets.
    """
    job = InferJob(**options)
    with _without_gc():
        from trainer.infer.infer import infer as run

    run(job)


@cli.command()
@_run_option("--parts", "PARTS", "Partition folder.", type=_FOLDER, required=True)
@click.option("--own", "part_ids", type=NumberList(), envvar="GNNFLEET_PART_IDS", required=True, help="Parts to serve.")
@click.option("--bind", required=True, help="Endpoint to listen on, tcp://address:port.")
@_run_option(
    "--cluster", "CLUSTER", "cluster.json of the run; read again when it changes.", type=_FOLDER, required=True
)
@click.option(
    "--node-rank", type=click.IntRange(min=0), envvar="NODE_RANK", required=True, help="Node rank in the cluster."
)
@click.option("--ready-file", type=_FOLDER, required=True, help="File to write when the server accepts requests.")
@_run_option(
    "--key-file",
    "SERVICE_KEY",
    "service.key, to encrypt; also admits the keys in clients/*.key beside it.",
    type=_FOLDER,
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Threads that answer requests other than for batches.",
)
@click.option(
    "--batch-threads", type=click.IntRange(min=1), default=lambda: len(os.sched_getaffinity(0)), show_default="CPUs",
    help="Threads that make batches for clients.",
)  # fmt: skip
@click.option(
    "--buffer-mb", type=click.IntRange(min=1), default=512, show_default=True,
    help="Largest total size in MB of finished batches that clients have not acknowledged.",
)  # fmt: skip
@click.option("--stats-file", type=_FOLDER, help="JSON file with load, clients and queues, written every 2 s.")
@_topology("replicated: the folder has the edges of all parts, and only rows are requested from other hosts.")
@_server_wait("Seconds to wait for a lost graph server when no other host has its parts.")
@_DIGESTS
def serve(**options: Any) -> None:
    """Serve parts to other hosts, and batches to clients, until SIGTERM."""
    with _without_gc():
        from trainer.service.serve import ServeJob
        from trainer.service.serve import serve as run

    run(ServeJob(**options))
