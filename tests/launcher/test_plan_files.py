"""Tests of the files that a plan sends to nodes: code of gnnfleet, parts, files of the user, a checkpoint."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.config.schema import DataConfig, NodeConfig, RunConfig
from launcher.errors import FleetError, UsageError
from launcher.files import CODE_ROOT
from launcher.plan.files import code_digest, code_files
from launcher.plan.own_script import imported_modules, own_command_files
from launcher.plan.partition import read_partition_files
from launcher.plan.render import print_plan
from plan_kit import cluster, facts_of, parts_folder, plan_of
from trainer.core.train_config import Start, TrainConfig


def test_each_node_gets_its_own_parts(tmp_path: Path) -> None:
    manifest = parts_folder(tmp_path, 3)
    config = cluster(data=DataConfig(dataset="synthetic", folder=str(tmp_path), num_parts=3, topology="partitioned"))
    plan = plan_of(config, manifest=manifest, facts=facts_of(2))
    sent = [[file for file in node.files if file.dest.startswith(node.data_dir + "/")] for node in plan.nodes]
    assert [[file.dest.removeprefix(plan.nodes[k].data_dir) for file in sent[k]] for k in (0, 1)] == [
        [
            "/shared/nodes/node/seeds/train.npy",
            "/part0/edges/node__to__node/indptr.npy",
            "/part0/nodes/node/attrs/x.npy",
            "/manifest.json",
        ],
        [
            "/shared/nodes/node/seeds/train.npy",
            "/part1/edges/node__to__node/indptr.npy",
            "/part1/nodes/node/attrs/x.npy",
            "/part2/edges/node__to__node/indptr.npy",
            "/part2/nodes/node/attrs/x.npy",
            "/manifest.json",
        ],
    ]
    for file in sent[1]:
        content = Path(file.source).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert plan.final and plan.nodes[0].data_dir == "/home/user0/gnnfleet-work/node0/data/f1"


def test_parts_of_a_different_number_are_not_sent(tmp_path: Path) -> None:
    plan = plan_of(cluster(), manifest=parts_folder(tmp_path, 3), facts=facts_of(2))
    assert not plan.final and "has 3 parts, but the config needs 2" in plan.notes[-1]
    assert not any("part0" in file.dest for file in plan.nodes[0].files)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other", "version": 1}', '{"format": "gnnfleet-partition"}'])
def test_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    assert read_partition_files(tmp_path) is None
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(FleetError, match=f"{tmp_path}/manifest.json: not a usable partition manifest"):
        read_partition_files(tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("path", "shared/../../x"),
        ("path", "/etc/passwd"),
        ("path", "part0//x"),
        ("path", "elsewhere/x"),
        ("path", "part0/a\0b"),
        ("path", "part0/\ud800"),
        ("path", 5),
        ("bytes", -1),
        ("bytes", 1.5),
        ("sha256", "../" * 21 + "x"),
        ("fingerprint", "../../x"),
        ("num_parts", 0),
        ("num_parts", [1]),
        ("nodes", {"a": {"splits": {"train": "many"}}}),
        ("files", [[[]]]),
    ],
)
def test_manifest_paths_outside_its_folder_are_refused(tmp_path: Path, place: str, value: object) -> None:
    text = Path(parts_folder(tmp_path, 2).folder, "manifest.json").read_text()
    manifest = json.loads(text)
    of = manifest["files"][0] if place in manifest["files"][0] else manifest
    of[place] = value
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FleetError, match=f"{tmp_path}/manifest.json: not a usable partition manifest"):
        read_partition_files(tmp_path)
    (tmp_path / "manifest.json").write_text(text[:-1] + ', "more": ' + "[" * 100_000)
    with pytest.raises(FleetError, match="not a usable partition manifest"):
        read_partition_files(tmp_path)


def test_parts_of_another_version_are_refused_naming_both_versions(tmp_path: Path) -> None:
    manifest = json.loads(Path(parts_folder(tmp_path, 2).folder, "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))
    with pytest.raises(FleetError, match="has format version 1, this program reads version 3.*make the parts again"):
        read_partition_files(tmp_path)


def test_folders_of_run_files_keep_their_structure(tmp_path: Path) -> None:
    # Folders in `run.files` keep their structure even if the launch starts in another folder. Two files that would get
    # the same path on the nodes are refused.
    for name in ("lib/a/__init__.py", "lib/__init__.py", "lib/__pycache__/a.pyc", "elsewhere/util.py", "util.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "cwd").mkdir()

    def sent(*files: str) -> list[str]:
        config = cluster(NodeConfig("a"), run=RunConfig(files=tuple(str(tmp_path / file) for file in files)))
        node = plan_of(config, own_command=("true",), cwd=tmp_path / "cwd").nodes[0]
        return [file.dest.partition("/files/")[2] for file in node.files if "/files/" in file.dest]

    assert sent("lib", "util.py") == ["lib/__init__.py", "lib/a/__init__.py", "util.py"]
    with pytest.raises(UsageError, match="would both be `util.py` on the nodes"):
        sent("util.py", "elsewhere/util.py")


def test_files_named_by_an_own_command_are_sent(tmp_path: Path) -> None:
    (tmp_path / "job" / "scripts").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for name in ("job/scripts/train.py", "other/extra.json", "job/go.sh"):
        (tmp_path / name).write_text("x")
    (tmp_path / "job/go.sh").chmod(0o755)
    words = ("./go.sh", "python", "scripts/train.py", "../other/extra.json", "scripts", "--n=1")
    plan = plan_of(cluster(NodeConfig("a", python="/py")), own_command=words, cwd=tmp_path / "job")
    node = plan.nodes[0]
    own = node.trainer.argv[node.trainer.argv.index("--") + 1 :]
    assert own == ("./go.sh", "python", "scripts/train.py", "extra.json", "scripts", "--n=1")
    sent = {file.dest.removeprefix(node.run_dir + "/"): file.mode for file in node.files if "/files/" in file.dest}
    assert sent == {"files/go.sh": 0o755, "files/scripts/train.py": 0o644, "files/extra.json": 0o644}
    assert node.trainer.cwd == f"{node.run_dir}/files" and "folder `scripts`" in plan.notes[-1]
    python = plan_of(cluster(NodeConfig("a", python="/py")), own_command=("python3", "-c", "1")).nodes[0]
    assert python.trainer.argv[-3:] == ("/py", "-c", "1")


def test_a_file_that_only_its_owner_may_read_stays_private(script: Path) -> None:
    modes = {"login.json": 0o600, "go.sh": 0o700, "train.py": 0o644, "shared.sh": 0o775}
    for name, mode in modes.items():
        (script / name).touch()
        (script / name).chmod(mode)
    sent = own_command_files(("python", *modes), (), script).files
    planned = {file.dest: file.mode for file in sent if file.dest in modes}
    assert planned == {"login.json": 0o600, "go.sh": 0o700, "train.py": 0o644, "shared.sh": 0o755}


def test_a_script_in_a_folder_of_run_files_stays_beside_its_modules(tmp_path: Path) -> None:
    for name in ("train.py", "common.py"):
        (tmp_path / "examples").mkdir(exist_ok=True)
        (tmp_path / "examples" / name).write_text("x")
    (tmp_path / "elsewhere").mkdir()
    config = cluster(run=RunConfig(files=(str(tmp_path / "examples"),)))
    words = ("python", str(tmp_path / "examples/train.py"))
    node = plan_of(config, own_command=words, cwd=tmp_path / "elsewhere").nodes[0]
    assert node.trainer.argv[-1] == "examples/train.py"
    sent = {file.dest.removeprefix(node.run_dir) for file in node.files if "/files/" in file.dest}
    assert sent == {"/files/examples/train.py", "/files/examples/common.py"}


TREE = {
    "train.py": """
        import os, torch, util
        from typing import TYPE_CHECKING
        from lib import layers
        import lib.data.load as load
        if TYPE_CHECKING:
            import types_only
        def later():
            import lazy
    """,
    "util.py": "import importlib\nimportlib.import_module('deep.er')\nimportlib.import_module(name := 'x')",
    "lazy.py": "",
    "types_only.py": "",
    "lib/__init__.py": "",
    "lib/layers.py": "from . import parts\nfrom .missing import x",
    "lib/parts.py": "",
    "lib/data/load.py": "",
    "deep/er.py": "",
    "torch_is_installed.txt": "",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


LIB = {"lib/__init__.py", "lib/layers.py", "lib/parts.py", "lib/data/load.py"}


def sent_with(script: Path, *own: str) -> tuple[tuple[str, ...], set[str]]:
    """Return the command on the node, from its script on, and the user's files beside it."""
    node = plan_of(cluster(NodeConfig("a", python="/py")), own_command=own, cwd=script).nodes[0]
    argv = node.trainer.argv[node.trainer.argv.index("--") + 1 :]
    return argv, {file.dest.partition("/files/")[2] for file in node.files if "/files/" in file.dest}


def test_modules_beside_the_script_that_it_imports_are_sent(script: Path) -> None:
    expected = {"train.py", "util.py", "lazy.py", "deep/er.py", *LIB}
    for own in (("python", "-u", "train.py", "--lr", "1"), ("train.py", "--lr", "1"), ("./train.py", "--lr", "1")):
        argv, sent = sent_with(script, *own)
        assert sent == expected and argv[0] == "/py" and argv[-3:] == (own[-3], "--lr", "1")
    assert sent_with(script.parent, "python", f"{script.name}/train.py")[1] == {f"{script.name}/{n}" for n in expected}
    elsewhere = script / "lib"
    assert sent_with(elsewhere, "python", str(script / "train.py"))[1] == expected


def test_an_executable_script_with_a_path_runs_itself(script: Path) -> None:
    (script / "train.py").chmod(0o755)
    assert sent_with(script, "./train.py")[0] == ("./train.py",)
    assert sent_with(script, "train.py")[0] == ("/py", "train.py")


@pytest.mark.parametrize(
    "own",
    [
        "python -W ignore -X dev train.py",
        "python -um train",
        "python -m cProfile -o profile train.py",
        "python -c 'import train'",
        "env A=1 nice -n 1 python train.py",
        "torchrun train.py",
        "./shebang",
        "bash -c 'cd . && python -u train.py'",
        "sh run.sh --lr 1",
        "./run.sh",
        "python elsewhere/paths.py",
        "python elsewhere/deep/path.py",
    ],
)
def test_modules_are_sent_however_their_script_is_started(own: str, script: Path, tmp_path: Path) -> None:
    # What is sent is enough: the command ends here as it does on a node, where nothing else is.
    (script / "types_only.py").unlink()
    (script / "lib/layers.py").write_text("from . import parts")
    (script / "util.py").write_text("import importlib\nimportlib.import_module('deep.er')")
    (script / "train.py").write_text("import util\nfrom lib import layers\nprint('trained')")
    (script / "shebang").write_text("#!/usr/bin/env python3\nimport train")
    (script / "run.sh").write_text("#!/bin/sh\nset -e\nfor fold in 1; do\n  python \\\n    train.py $fold\ndone | cat")
    (script / "elsewhere/deep").mkdir(parents=True)
    (script / "elsewhere/paths.py").write_text("import sys\nsys.path.append('.')\nimport train")
    (script / "elsewhere/deep/path.py").write_text(
        "import os, sys\nsys.path[:0] = [os.path.join(os.path.dirname(__file__), '..', '..', 'lib')]\n"
        "import parts\nprint('trained')"
    )
    for name in ("shebang", "run.sh"):
        (script / name).chmod(0o755)
    sent = own_command_files(shlex.split(own), (), script)
    node = tmp_path / "node"
    for file in sent.files:
        (node / file.dest).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.source, node / file.dest)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["python" if word == "torchrun" else word for word in sent.argv]
    assert "trained" in subprocess.run(command, cwd=node, env=variables, capture_output=True, text=True).stdout


def test_files_in_options_are_sent_and_programs_of_this_machine_are_not(script: Path, tmp_path: Path) -> None:
    (script / "conf.yml").write_text("x")
    (script / ".venv/bin").mkdir(parents=True)
    (script / ".venv/bin/python3.11").symlink_to(sys.executable)
    argv, sent = sent_with(script / "lib", "python", "layers.py", f"--conf={script}/conf.yml", "--text", "x" * 300)
    assert argv[1:] == ("layers.py", "--conf=conf.yml", "--text", "x" * 300) and {"layers.py", "conf.yml"} <= sent
    for python in (".venv/bin/python3.11", sys.executable):
        argv, sent = sent_with(script, python, "util.py")
        assert argv == ("/py", "util.py") and sent == {"util.py", "deep/er.py"}
    (script / "go.sh").write_text("#!/bin/sh\necho")
    (script / "go.sh").chmod(0o755)
    assert sent_with(script / "lib", "../go.sh") == (("./go.sh",), {"go.sh"})  # PATH does not have it
    for own in (("./gone",), ("bash", "gone.sh"), ("python", "-u", "gone.py")):
        with pytest.raises(UsageError, match="there is no file `.*gone.* in .*, the folder from which files are sent"):
            sent_with(script, *own)


def test_a_module_that_is_run_is_sent_with_its_package(script: Path) -> None:
    assert sent_with(script, "python3", "-m", "deep.er")[1] == {"deep/er.py"}
    assert sent_with(script, "python3", "-m", "lib.layers")[1] == LIB
    assert sent_with(script, "python3", "-m", "torch.distributed.run")[1] == set()


def test_a_model_class_is_sent_with_its_package(tmp_path: Path) -> None:
    names = ("src/pkg/__init__.py", "src/pkg/layers.py", "src/pkg/deep/__init__.py", "src/pkg/deep/models.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from ..layers import act\n" if name.endswith("models.py") else "")
    config = cluster(NodeConfig("a", python="/py"), train=TrainConfig(model=f"{names[3]}:Net"))
    node = plan_of(config, cwd=tmp_path).nodes[0]
    assert f"files/{names[3]}:Net" in node.trainer.argv
    files = {file.dest.partition("/files/")[2] for file in node.files if f"{node.run_dir}/files/" in file.dest}
    assert files == set(names)
    with pytest.raises(UsageError, match="the package of `deep/models.py` is not in .*start from the folder that"):
        plan_of(replace(config, train=TrainConfig(model="deep/models.py:Net")), cwd=tmp_path / "src/pkg")


@pytest.mark.parametrize(
    "own", [("torchrun", "--nproc_per_node", "4", "train.py"), ("python", "-m", "torch.distributed.run", "train.py")]
)
def test_another_launcher_in_the_command_is_noted(own: tuple[str, ...], script: Path) -> None:
    plan = plan_of(cluster(NodeConfig("a", python="/py")), own_command=own, cwd=script)
    assert [note for note in plan.notes if "is started in each process of the run" in note]
    plan = plan_of(cluster(NodeConfig("a", python="/py")), own_command=("python", "train.py", "-m", "srun"), cwd=script)
    assert not [note for note in plan.notes if "is started in each process of the run" in note]


def test_scripts_that_cannot_be_read_are_sent_alone(script: Path) -> None:
    (script / "broken.py").write_text("import util\n(")
    assert sent_with(script, "python", "broken.py")[1] == {"broken.py"}
    assert sent_with(script, "python", "-c", "import util\n(")[1] == set()


def test_too_many_modules_are_refused(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.plan.own_script._MOST_MODULES", 6)
    with pytest.raises(UsageError, match=r"imports 7 modules of 0 MB from .*, too many to send"):
        sent_with(script, "python", "train.py")
    with pytest.raises(UsageError, match=r"there is no file `gone.py`"):
        sent_with(script, "gone.py")


def test_a_script_of_the_checkout_may_import_gnnfleet() -> None:
    assert imported_modules(["python", "launch.py"], CODE_ROOT) == (CODE_ROOT, [])


def test_a_plan_shows_the_paths_of_the_users_files(script: Path) -> None:
    config = cluster(NodeConfig("a"), run=RunConfig(files=(str(script / "lib"),)))
    plan = plan_of(config, own_command=("python", "train.py"), cwd=script)
    console = Console(width=400, record=True, file=io.StringIO())
    print_plan(plan, console, every=True)
    assert "own: deep/er.py (0 bytes), lazy.py (0 bytes), lib/__init__.py (0 bytes)" in console.export_text()


def test_resume_by_file_and_by_run_id(tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "old-run" / "checkpoints" / "last.pt"
    checkpoint.parent.mkdir(parents=True)
    with zipfile.ZipFile(checkpoint, "w") as archive:
        archive.writestr("last/data.pkl", b"weights")
    size = checkpoint.stat().st_size
    for wanted in ("old-run", str(checkpoint)):
        node = plan_of(cluster(train=TrainConfig(resume=wanted)), cwd=tmp_path).nodes[1]
        sent = next(file for file in node.files if file.source == str(checkpoint))
        assert (sent.bytes, sent.dest) == (size, f"{node.run_dir}/resume.pt")
        assert node.trainer.argv[-2:] == ("--resume", sent.dest)
        own = plan_of(cluster(train=TrainConfig(resume=wanted)), cwd=tmp_path, own_command=("true",)).nodes[1]
        assert own.trainer.env["GNNFLEET_RESUME"] == f"{own.run_dir}/resume.pt"
    # Weights to start from are sent alike, but not to a run that is resumed, nor for an own command.
    start = Start("old-run", ("layers.0",))
    node = plan_of(cluster(train=TrainConfig(start=start)), cwd=tmp_path).nodes[1]
    moved = {"checkpoint": f"{node.run_dir}/start.pt", "modules": ["layers.0"]}
    assert node.trainer.argv[-2:] == ("--start", json.dumps(moved)) and str(checkpoint) in {
        f.source for f in node.files
    }
    resumed = TrainConfig(start=Start("gone"), resume="old-run")
    assert "--start" not in plan_of(cluster(train=resumed), cwd=tmp_path).nodes[1].trainer.argv
    assert (
        "--start" not in plan_of(cluster(train=TrainConfig(start=start)), own_command=("true",)).nodes[1].trainer.argv
    )
    assert "GNNFLEET_RESUME" not in plan_of(cluster(), own_command=("true",)).nodes[1].trainer.env
    for name, gone in (("resume", TrainConfig(resume="gone")), ("start", TrainConfig(start=Start("gone")))):
        message = f"train.{name}: there is no file `gone`, and no run with this id has a checkpoint"
        with pytest.raises(UsageError, match=message):
            plan_of(cluster(train=gone), cwd=tmp_path)
    with pytest.raises(OSError, match="Input/output error"):  # of the file, which is not called damaged
        plan_of(cluster(train=TrainConfig(resume="/proc/self/mem")), cwd=tmp_path)
    checkpoint.write_bytes(checkpoint.read_bytes()[:-5])
    for cut in (TrainConfig(resume="old-run"), TrainConfig(start=start)):
        with pytest.raises(UsageError, match=r"last.pt` is no checkpoint, or not a whole one"):
            plan_of(cluster(train=cut), cwd=tmp_path)
    assert plan_of(cluster(train=TrainConfig(resume="old-run")), cwd=tmp_path, own_command=("true",)), "of any format"


def test_code_files_are_gnnfleet_launcher_node_and_trainer() -> None:
    names = {path.relative_to(CODE_ROOT).as_posix() for path in code_files()}
    assert {"launcher/__init__.py", "launcher/node/supervisor/supervisor.py", "trainer/core/errors.py"} <= names
    assert "gnnfleet/__init__.py" in names
    folders = ("gnnfleet/", "launcher/node/", "trainer/")
    assert all(name.startswith(folders) for name in names - {"launcher/__init__.py"})
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)
    assert len(code_digest()) == 64 and code_digest() == code_digest()
