"""Tests of the command line: options, output and exit statuses."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import __version__
from launcher.cli import main
from launcher.errors import FleetError, Interrupted, PreflightRefused, SessionError
from run_kit import make_parts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yml"
    path.write_text(
        "name: toy\ntransport: local\nnodes: 2\ndata: {dataset: synthetic, folder: parts}\n"
        "train: {fanouts: [4, 4], epochs: 7}\n"
    )
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.run([*words]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def trainer_of(plan: dict[str, Any], node_rank: int = 0) -> list[str]:
    argv: list[str] = plan["nodes"][node_rank]["trainer"]["argv"]
    return argv


@pytest.mark.parametrize("dash", ["-", "_"])
def test_older_option_names_work_with_dashes_and_underscores(
    config: Path, capsys: pytest.CaptureFixture[str], dash: str
) -> None:
    options = {
        "batch_size": "64",
        "num_neighbors": "5,3",
        "num_training_procs": "3",
        "master_addr": "10.0.0.9",
        "master_port": "12345",
        "epochs": "4",
        "runs_dir": "elsewhere",
        "run_id": "mine",
    }
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', dash)}", value)]
    plan = planned(capsys, "--config", str(config), f"--dry{dash}run", "--json", *words)
    argv = " ".join(trainer_of(plan))
    assert "--batch-size 64" in argv and "--fanouts 5,3" in argv and "--epochs 4" in argv
    assert [node["ranks"] for node in plan["nodes"]] == [[0, 1, 2], [3, 4, 5]]
    env = plan["nodes"][1]["trainer"]["env"]
    assert (env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("6", "10.0.0.9", "12345")
    assert (plan["world_size"], plan["run_id"], Path(plan["runs_dir"]).name) == (6, "mine", "elsewhere")


def test_num_training_procs_is_checked_like_the_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(config), "--dry-run", "--num_training_procs", "3"]
    assert main.run([*words, "--batch_size", "5"]) == 2
    assert "fewer seeds than processes (6)" in capsys.readouterr().err
    assert main.run([*words, "--set", "nodes.1.devices=[0]"]) == 2
    assert "nodes.1: more procs (3) than devices (1)" in capsys.readouterr().err
    assert main.run(["--config", str(config), "--dry-run", "--set", "train.*.x=1"]) == 2
    assert "train is not a list" in capsys.readouterr().err


def test_set_overrides_any_key_and_plan_equals_dry_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(config), "--json", "--run-id", "a", "--set", "train.lr=0.5", "--set", "nodes.1.procs=2"]
    one, two = planned(capsys, "plan", *words), planned(capsys, "--dry-run", *words)
    assert one == two
    assert "--lr 0.5" in " ".join(trainer_of(one)) and len(one["nodes"][1]["ranks"]) == 2


def test_arguments_after_two_dashes_are_the_own_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "train_mine.py").write_text("print()")
    own = ["python", "train_mine.py", "--epochs", "9", "--", "--json"]
    for command in ([], ["launch", "--dry-run"], ["plan"]):
        dry = [] if command else ["--dry-run"]
        plan = planned(capsys, *command, *dry, "--config", str(config), "--json", "--", *own)
        argv = trainer_of(plan)
        assert argv[argv.index("--") + 2 :] == own[1:]
        assert any(file["dest"].endswith("/files/train_mine.py") for file in plan["nodes"][1]["files"])


def test_options_before_a_command_apply(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--config", str(config), "--json", "plan", "--epochs", "2")
    assert "--epochs 2" in " ".join(trainer_of(plan))


def test_run_ids_contain_the_name_and_differ(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = {planned(capsys, "plan", "--config", str(config), "--json")["run_id"] for _ in range(3)}
    assert len(ids) == 3 and all(run_id.startswith("toy-20") for run_id in ids)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "cluster.yml", "--dry-run", "--run-id", "a b"], "letters, digits"),
        (["--config", "cluster.yml", "--dry-run", "--run-id", "../up"], "letters, digits"),
        (["--config", "cluster.yml", "--dry-run", "--run-id", "used"], "exists already; choose another id"),
        (["--config", "nowhere.yml", "--dry-run"], "nowhere.yml: cannot be read"),
        (["--config", "cluster.yml", "--wait", "soon"], "--wait soon: give the longest time to wait, such as 90s"),
        (["--config", "cluster.yml", "--nodes-needed", "9"], "--nodes-needed 9: the cluster file has only"),
        (["--config", "cluster.yml", "--nodes-needed", "1", "--dry-run"], "--nodes-needed chooses among hosts"),
        (["--config", "cluster.yml", "--wait", "--set", "transport=slurm"], "--wait: Slurm queues jobs"),
        (["queue"], "give the cluster file: --config cluster.yml"),
        (["--config", "cluster.yml", "--dry-run", "--set", "train.epoch=3"], "did you mean `epochs`?"),
        (["--config", "cluster.yml", "--dry-run", "--epochs", "many"], "train.epochs"),
        (["--config", "cluster.yml", "--dryrun"], "--dry-run"),
        (["--config", "cluster.yml", "--"], "python train_mine.py"),
        (["--dry-run"], "--config cluster.yml"),
        (["lunch", "--config", "cluster.yml"], "No such command 'lunch'"),
        (["--config", "cluster.yml", "--num_training_procs", "0"], "num-training-procs"),
        (["--config", "cluster.yml", "--dry-run", "--resume", "no-such-run"], "no-such-run"),
        (["--config", "cluster.yml", "--runs-dir", "~nobody-9/runs"], "there is no user nobody-9 on this machine"),
        (["init", "--template", "local", "-o", "-"], "does not write to stdout; name a file"),
        (["report", "used", "-o", "runs"], "File 'runs' is a directory"),
        (["status", "~nobody-9/run"], "~nobody-9/run is not a folder"),
        (["rehearse", "--config", "cluster.yml", "--folder", "~nobody-9/x"], "~nobody-9/x: there is no such user"),
    ],
)
def test_bad_usage_prints_one_message_and_exits_with_2(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (config.parent / "runs/used").mkdir(parents=True)
    assert main.run(words) == 2
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err
    assert output.out == ""


def test_output_to_a_dash_is_stdout(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["export", "--config", str(config), "--to", "bash", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("#!") and not Path("-").exists()


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["export", "--config", str(config), "--to", "bash", "-o", "/proc/run.sh"]) == 1
    assert capsys.readouterr().err == "error: /proc/run.sh: No such file or directory\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SessionError("no tmux"), 1),
        (PreflightRefused("no"), 3),
        (Interrupted("stopped"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_print_one_line_and_exit_with_their_status(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(main, "run_launch", fail)
    assert main.run(["--config", str(config)]) == status
    output = capsys.readouterr().err
    assert len(output.strip().splitlines()) == 1
    if isinstance(error, FleetError):
        assert str(error) in output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"gnnfleet {__version__}\n"
    done = subprocess.run([sys.executable, ROOT / "launch.py", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"gnnfleet {__version__}\n")


def test_without_arguments_help_is_printed_and_the_status_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 2
    assert "Examples:" in capsys.readouterr().out


def test_check_prints_json_and_exits_with_3(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "nodes.1.python=/no/such/python", "--json"]
    assert main.run(["check", "--config", str(config), *words]) == 3
    output = capsys.readouterr()
    findings = json.loads(output.out)["findings"]
    assert any(f["node_rank"] == 1 and f["severity"] == "block" for f in findings)
    assert "/no/such/python" in output.err


def test_check_ends_with_a_verdict(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["check", "--config", str(config)]) == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert re.fullmatch(r"Ready: 2 nodes, no errors(, \d+ warnings?)?", last)
    assert main.run(["check", "--config", str(config), "--set", "nodes.1.python=/no/such/python"]) == 3
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert re.fullmatch(r"Not ready: 2 nodes, 1 error(, \d+ warnings?)?", last)


def test_check_compares_the_files_of_shared_parts_with_the_manifest(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_parts(config.parent / "shared")
    words = ["check", "--config", str(config), "--set", "data.mode=verify", "--set", f"data.folder={folder}"]
    assert main.run(words) == 0
    assert re.search(r"ok +parts +both nodes +all 8 files .* match the manifest", capsys.readouterr().out)
    damaged = folder / "part1/nodes/node/attrs/x.npy"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main.run([*words, "--json"]) == 3
    output = capsys.readouterr()
    assert output.err.rstrip().splitlines()[-1].startswith("Not ready: 2 nodes, 1 error")
    (wrong,) = (one for one in json.loads(output.out)["findings"] if one["severity"] == "block")
    assert (wrong["node_rank"], wrong["check"]) == (1, "parts")
    assert wrong["message"] == f"{damaged} differs from the manifest"


def test_partition_without_config_passes_all_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        subprocess, "run", lambda argv, **_: seen.append(list(argv)) or subprocess.CompletedProcess(argv, 7)
    )
    assert main.run(["partition", "make", "--dataset", "synthetic", "--num-parts", "2", "--out", "p"]) == 7
    assert seen[0][2:] == ["partition", "make", *"--dataset synthetic --num-parts 2 --out p".split()]


@pytest.mark.parametrize("what", ["make", "verify", "inspect"])
def test_partition_with_a_config_takes_graph_and_folder_from_it(
    config: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        subprocess, "run", lambda argv, **_: seen.append(list(argv)) or subprocess.CompletedProcess(argv, 0)
    )
    assert main.run(["partition", what, "--config", str(config)]) == 0
    assert seen[0][3] == what and str(config.parent / "parts") in seen[0]
    assert ("--num-parts" in seen[0]) == (what == "make")


def test_dry_run_of_64_hosts_is_fast_and_imports_no_ssh(tmp_path: Path) -> None:
    nodes = "".join(f"  - {{host: gpu{k}.example.org, devices: [0, 1, 2, 3]}}\n" for k in range(64))
    config = tmp_path / "big.yml"
    config.write_text(f"nodes:\n{nodes}data: {{dataset: ogbn-products, folder: parts}}\n")
    code = (
        "import sys; from launcher.cli.main import run; "
        f"status = run(['--config', {str(config)!r}, '--dry-run']); "
        "heavy = {'paramiko', 'fabric', 'torch', 'libtmux', 'numpy'} & set(sys.modules); sys.exit(f'{status} {heavy}')"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.strip() == "0 set()"
    assert "gpu[0-63].example.org" in done.stdout
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 6, "processor time in seconds; usually 0.5 to 1, more on slow or busy machines"
