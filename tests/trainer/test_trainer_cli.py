"""Tests of the trainer's command line, and of settings from environment variables."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forked import fork
from ports import free_port
from train_kit import REPOSITORY, command_line, environment, write_parts
from trainer.cli import cli, main
from trainer.core.errors import PartitionError, SettingsError
from trainer.core.ranks import Ranks, run_store
from trainer.core.train_config import MODELS, EarlyStop, Schedule, TrainConfig
from trainer.nn.models import HETERO_MODELS, HOMO_MODELS
from trainer.store.part_store import open_parts
from trainer.train.settings import TrainJob, TrainSettings


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[TrainJob]:
    """Replace ``train`` with a function that records its job. Return the list of recorded jobs."""
    import trainer.train.job

    taken: list[TrainJob] = []
    monkeypatch.setattr(trainer.train.job, "train", taken.append)
    for name in ("PARTS", "RUN_DIR", "PART_IDS", "CLUSTER", "SERVICE_KEY"):
        monkeypatch.delenv(f"GNNFLEET_{name}", raising=False)
    return taken


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli, ["train", "--parts", "parts", *words])


def test_the_names_of_the_settings_are_those_of_the_bundled_models() -> None:
    assert MODELS == (*HOMO_MODELS, *HETERO_MODELS)


def test_flags_of_the_launcher_round_trip_to_its_settings(jobs: list[TrainJob]) -> None:
    from launcher.plan.commands import train_flags

    values = {"model": "gat", "hidden": 64, "fanouts": (-1, 4), "layers": 2, "replace": True, "lr": 0.5, "timeout": 9.0}
    values |= {
        "optimizer": {"name": "AdamW", "betas": [0.9, 0.99]},
        "clip": 1.0,
        "class_weights": (1.0, 2.5),
        "metrics": ("roc_auc",),
    }
    keyed = {"early_stop": EarlyStop(3, min_delta=0.1), "schedule": Schedule("cosine", warmup_epochs=2, lowest=0.1)}
    assert invoke(*train_flags(TrainConfig(**values, **keyed))).exit_code == 0
    expected = TrainSettings(**values, **{name: dataclasses.asdict(value) for name, value in keyed.items()})
    assert jobs == [TrainJob(expected, Path("parts"), Path("run"))]
    assert train_flags(TrainConfig(model_args={"act": None}))[2:4] == ["--model-args", '{"act": null}']


def test_flags_accept_underscores_and_comma_separated_lists(jobs: list[TrainJob]) -> None:
    result = invoke("--batch_size", "512", "--eval-batch-size=64", "--eval_fanouts", "-1,3", "--fanouts", "15,10")
    assert result.exit_code == 0, result.output
    settings = jobs[0].settings
    assert (settings.batch_size, settings.eval_batch_size) == (512, 64)
    assert (settings.eval_fanouts, settings.fanouts) == ((-1, 3), (15, 10))


def test_folders_come_from_the_environment_of_a_run(jobs: list[TrainJob]) -> None:
    env = {
        "GNNFLEET_PARTS": "/data/parts", "GNNFLEET_PART_IDS": "0,2", "GNNFLEET_CLUSTER": "/run/cluster.json",
        "GNNFLEET_SERVICE_KEY": "/run/service.key", "GNNFLEET_RUN_DIR": "/run",
    }  # fmt: skip
    assert CliRunner(env=env).invoke(cli, ["train"]).exit_code == 0
    places = (Path("/data/parts"), Path("/run"), (0, 2), Path("/run/cluster.json"), Path("/run/service.key"))
    assert jobs == [TrainJob(TrainSettings(), *places)]


@pytest.mark.parametrize("value,part_ids", [("", ()), (None, None), ("1", (1,))])
def test_an_empty_list_of_parts_means_no_part_not_all(
    jobs: list[TrainJob], value: str | None, part_ids: tuple[int, ...] | None
) -> None:
    assert CliRunner(env={"GNNFLEET_PART_IDS": value}).invoke(cli, ["train", "--parts", "p"]).exit_code == 0
    assert CliRunner(env={"GNNFLEET_PART_IDS": value}).invoke(
        cli, ["train", "--parts", "p", "--part-ids", "0"]
    ).exit_code == 0  # fmt: skip
    assert [job.part_ids for job in jobs] == [part_ids, (0,)]


@pytest.mark.parametrize(
    "words,message",
    [
        (["--hidden", "0"], "hidden is 0; it must be at least 1"),
        (["--dropout", "1"], "dropout is 1.0; it must be less than 1"),
        (["--lr", "0"], "lr is 0.0; it must be more than 0"),
        (["--lr", "nan"], "lr is nan; it must be more than 0"),
        (["--timeout", "inf"], "timeout is inf; it must be less than 1000000"),
        (["--seed", str(2**64)], f"seed is {2**64}; it must be less than 4294967296"),
        (["--layers", "2"], "layers: 2, but fanouts has 3 numbers"),
        (["--fanouts", "5,0"], "fanouts: each must be -1 (all neighbours) or at least 1; found 0"),
        (["--eval-fanouts", "5"], "eval_fanouts: 1 numbers, but fanouts has 3"),
    ],
)
def test_invalid_settings_exit_with_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--parts", "parts", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(SettingsError, match="epochs is 0.*\n.*batch_size is -1|batch_size is -1.*\n.*epochs is 0"):
        TrainSettings(epochs=0, batch_size=-1)


def test_an_invalid_list_is_refused_with_its_flag() -> None:
    result = invoke("--fanouts", "15;10")
    assert result.exit_code == 2
    assert "'15;10' is not a list of whole numbers like 15,10,5" in result.output


def test_a_user_error_is_one_line_and_exit_1_in_a_real_process(tmp_path: Path) -> None:
    process = fork(["-m", "trainer", "train", "--parts", str(tmp_path / "none")], environment(), tmp_path)
    assert process.wait() == 1
    assert process.output.startswith(f"error: {tmp_path}/none/manifest.json is missing")
    assert "Traceback" not in process.output and list(tmp_path.iterdir()) == []


def test_a_programming_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.train.job

    monkeypatch.setattr(trainer.train.job, "train", lambda job: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        main(["train", "--parts", "parts"])


def test_help_lists_every_command() -> None:
    assert "--sampler-threads" in CliRunner().invoke(cli, ["train", "--help"]).output
    listed = CliRunner().invoke(cli, ["--help"]).output
    assert all(f"  {name} " in listed for name in ("infer", "inspect", "partition", "serve", "train", "verify"))


def test_help_of_infer_names_the_files_it_writes() -> None:
    said = CliRunner().invoke(cli, ["infer", "--help"]).output
    assert "--nodes-at-once" in said and "logits.npy" in said and "infer.json" in said


def test_inspect_shows_a_partition(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(write_parts(tmp_path / "parts", 2))])
    assert result.exit_code == 0, result.output
    assert "600" in result.output


@pytest.mark.parametrize("left", [0, -8])
def test_verify_finds_a_broken_file_that_opening_refuses(tmp_path: Path, left: int) -> None:
    parts = write_parts(tmp_path / "parts", 2)
    assert "sound" in CliRunner().invoke(cli, ["verify", str(parts)]).output
    broken = parts / "part1/nodes/node/attrs/x.npy"
    broken.write_bytes(broken.read_bytes()[:left])
    found = CliRunner().invoke(cli, ["verify", str(parts)])
    assert found.exit_code == 1 and "part1/nodes/node/attrs/x.npy" in found.output
    with pytest.raises(PartitionError, match="x.npy cannot be read; launch again, which replaces it"):
        open_parts(parts, [1])


def test_a_job_survives_its_command_line(jobs: list[TrainJob]) -> None:
    job = TrainJob(TrainSettings(replace=True, resume="last.pt", eval_fanouts=(-1, -1, -1)), Path("p"), Path("r"))
    assert CliRunner().invoke(cli, command_line(job)).exit_code == 0
    assert jobs == [job]


def test_ranks_come_from_the_environment() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    ranks = Ranks.from_env({**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert ranks == Ranks(3, 4, 1, 2, 1, "10.0.0.1", 29500, socket.gethostname())
    assert str(ranks) == f"rank 3 (node1, {socket.gethostname()})"
    assert Ranks.from_env({}) == Ranks(host=socket.gethostname())


@pytest.mark.parametrize(
    "environ,message",
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        (
            {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=.x. in the environment",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK 2 is not below WORLD_SIZE 2"),
    ],
)
def test_an_invalid_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Ranks.from_env(environ)


def accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_rank_0_binds_the_store_to_its_own_address_only(address: str) -> None:
    port = free_port()
    store = run_store(Ranks(0, 1, master_addr=address, master_port=port), 10.0)
    store.set("key", "value")
    assert accepts("127.0.0.1", port) and not accepts("127.0.0.2", port)


ABORTING = """
import ctypes, runpy, sys
library = ctypes.CDLL(None)
library.__cxa_atexit(ctypes.cast(library.abort, ctypes.c_void_p), None, None)  # as a destructor of torch's at exit
runpy.run_module("trainer", run_name="__main__")
"""


@pytest.mark.slow
def test_a_destructor_that_aborts_at_exit_does_not_fail_a_finished_rank(tmp_path):
    parts = write_parts(tmp_path / "parts")
    words = ["train", "--parts", str(parts), "--run-dir", str(tmp_path / "run"), "--epochs", "1"]
    command = [sys.executable, "-c", ABORTING, *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "test accuracy" in done.stdout, done.stderr


@pytest.mark.parametrize("words", [["inspect"], ["train", "--topology", "whole", "--parts"]], ids=["run", "usage"])
def test_errors_break_between_words_on_a_terminal(monkeypatch, capsys, tmp_path, words) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = [*words, str(tmp_path / "parts-that-are-not-there")]
    with pytest.raises(SystemExit):
        main(words)
    piped = capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(SystemExit):
        main(words)
    shown = capsys.readouterr().err
    assert shown.split() == piped.split() and max(map(len, piped.splitlines())) > 40
    path = str(tmp_path / "parts-that-are-not-there")
    assert all(len(line) <= 40 or line.lstrip("(").startswith(path) for line in shown.splitlines()), shown
