"""Tests of settings of single nodes, with three nodes that differ in every setting."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.command import Command, render
from launcher.config.loader import load_config, to_yaml
from launcher.config.schema import ClusterConfig
from launcher.errors import ConfigError
from launcher.files import CODE_ROOT
from launcher.plan.model import NodePlan
from plan_kit import plan_of

#: A stub of Python: a shell script that prints its path, working folder, arguments and environment.
STUB = """#!/bin/sh
echo "$0|$PWD|$*"
env | grep -E '^(COMMON|LEVEL|MODULE|DEFAULT|ACTIVE|PYTHONPATH|CUDA_VISIBLE_DEVICES|GLOO_SOCKET_IFNAME)=' | sort
"""
CONFIG = """
defaults: {user: alice, env: {COMMON: "1", LEVEL: low}, setup: [export DEFAULT=yes], venv: HERE/nowhere}
nodes:
  - {host: gpu1, port: 2222, key: keys/one, venv: "HERE/a venv", workdir: HERE/w0, devices: [3, 1], env: {LEVEL: high}}
  - host: 10.0.0.8
    user: bob
    password: true
    conda: my env
    workdir: HERE/w{node_rank}
    procs: 3
    setup: [export CONDA_EXE=HERE/conda/bin/conda, "export MODULE='a b'"]
    address: 192.168.1.8
    interface: ib0
  - {host: gpu3, python: HERE/py/bin/python3.12, workdir: HERE/w 2, devices: [0], env: {PYTHONPATH: /opt/mine}}
data: {dataset: synthetic, num_parts: 5}
run: {service_port: 7000}
"""


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[NodePlan, ...]:
    for name in ("a venv/bin/python", "py/bin/python3.12", "conda/envs/python"):
        stub = tmp_path / name
        stub.parent.mkdir(parents=True)
        stub.write_text(STUB)
        stub.chmod(0o755)
    profile = tmp_path / "conda/etc/profile.d/conda.sh"
    profile.parent.mkdir(parents=True)
    profile.write_text(f'conda() {{ export ACTIVE="$1 $2" PATH={shlex.quote(str(tmp_path))}/conda/envs:"$PATH"; }}\n')
    config = tmp_path / "c.yml"
    config.write_text(CONFIG.replace("HERE", str(tmp_path)))
    return plan_of(load_config(config)).nodes


def ran(command: Command) -> tuple[list[str], dict[str, str]]:
    """Run a command of a plan in bash, with a stub of Python.

    Returns the stub's [path, working folder, arguments], and its environment.
    """
    Path(command.cwd).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["env", "-i", "PATH=/usr/bin:/bin", "bash", "-c", render(command)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    return first.split("|"), dict(line.split("=", 1) for line in rest)


def test_each_node_starts_with_its_own_python_environment_and_folder(
    nodes: tuple[NodePlan, ...], tmp_path: Path
) -> None:
    pythons = ["a venv/bin/python", "conda/envs/python", "py/bin/python3.12"]
    own = [
        {"COMMON": "1", "DEFAULT": "yes", "LEVEL": "high"},
        {"COMMON": "1", "LEVEL": "low", "MODULE": "a b", "ACTIVE": "activate my env"},
        {"COMMON": "1", "DEFAULT": "yes", "LEVEL": "low"},
    ]
    for node, python, folder, expected in zip(nodes, pythons, ["w0", "w1", "w 2"], own, strict=True):
        (itself, cwd, words), seen = ran(node.start)
        assert (itself, cwd) == (str(tmp_path / python), node.run_dir)
        assert node.run_dir == f"{tmp_path}/{folder}/runs/r1/node{node.node_rank}"
        assert words == f"-S {node.code_dir}/launcher/node/supervisor/supervisor.py {node.run_dir}/node.json"
        paths = seen.pop("PYTHONPATH").split(":")
        assert paths == [node.code_dir, *(["/opt/mine"] if node.node_rank == 2 else [])]
        assert seen == expected


def test_each_node_trains_on_its_own_devices_ranks_and_interface(nodes: tuple[NodePlan, ...]) -> None:
    environments = []
    for node in nodes:
        argv, env = node.trainer.argv, node.trainer.env
        assert {str(argv[0]), str(argv[argv.index("--") + 1])} == {node.start.argv[0]}
        assert (env["MASTER_ADDR"], env["GROUP_WORLD_SIZE"], env["WORLD_SIZE"]) == ("gpu1", "3", "6")
        environments.append((env["GROUP_RANK"], env["CUDA_VISIBLE_DEVICES"], env.get("GLOO_SOCKET_IFNAME")))
    assert environments == [("0", "3,1", None), ("1", "", "ib0"), ("2", "0", None)]
    assert [node.ranks for node in nodes] == [(0, 1), (2, 3, 4), (5,)]
    assert [node.target for node in nodes] == ["alice@gpu1:2222", "bob@10.0.0.8", "alice@gpu3"]


def test_each_node_serves_its_own_parts_at_its_own_address(nodes: tuple[NodePlan, ...]) -> None:
    served = []
    for node in nodes:
        assert node.server is not None and node.server.env["CUDA_VISIBLE_DEVICES"] == ""
        argv = node.server.argv
        served.append((argv[argv.index("--own") + 1], argv[argv.index("--bind") + 1]))
        assert argv[argv.index("--parts") + 1] == f"{node.workdir}/data/synthetic"
    assert served == [("0", "tcp://gpu1:7000"), ("1,2", "tcp://192.168.1.8:7001"), ("3,4", "tcp://gpu3:7002")]


def test_each_node_has_its_own_login_key_and_password(tmp_path: Path) -> None:
    config = tmp_path / "c.yml"
    config.write_text(CONFIG.replace("HERE", str(tmp_path)))
    reached = [(node.login, node.key, node.password) for node in load_config(config).nodes]
    assert reached == [
        ("alice@gpu1:2222", str(tmp_path / "keys/one"), False),
        ("bob@10.0.0.8", None, True),
        ("alice@gpu3", None, False),
    ]


def test_each_node_leases_its_own_devices_and_port(nodes: tuple[NodePlan, ...]) -> None:
    specs = [next(file for file in node.files if file.dest.endswith("/node.json")) for node in nodes]
    leases = [json.loads(spec.content.reveal())["leases"] for spec in specs]  # type: ignore[attr-defined]
    assert [[one for one in taken if one.startswith("cuda")] for taken in leases] == [
        ["cuda:1", "cuda:3"],
        [],
        ["cuda:0"],
    ]
    assert [taken[-1] for taken in leases] == ["port:7000", "cpu:r1-node1", "port:7002"]


# Templates


def commands() -> list[tuple[Path, list[str]]]:
    return [
        (template, shlex.split(line.removeprefix("#"), comments=False))
        for template in sorted((CODE_ROOT / "templates").glob("*.yml"))
        for line in template.read_text().splitlines()
        if line.startswith("#   python launch.py") and " -- " not in line
    ]


@pytest.mark.parametrize(("template", "words"), commands(), ids=lambda value: str(value)[-60:])
def test_commands_in_templates_work(
    template: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(template.parent)
    asked = [words[i : i + 2] for i in range(len(words)) if words[i] in ("--include", "--exclude")]
    chosen = [word for pair in asked for word in pair]
    assert main.run(["plan", "--config", template.name, *chosen]) == 0
    assert template.name in words[words.index("--config") + 1]
    shown = capsys.readouterr().out
    assert ("node03" not in shown and " 0,2,5,6 " in shown) if "node03" in chosen else "node0 " in shown


@pytest.mark.parametrize(
    ("node", "overrides", "note"),
    [
        ("python: /usr/bin/python3", [], "`python: /usr/bin/python3` of this node (FILE:4)"),
        ("user: bob", ["nodes.1.conda=gnn"], "`conda: gnn` of this node (--set nodes.1.conda=gnn)"),
        ("venv: /srv/venv", [], ""),
        ("user: bob", [], ""),
    ],
)
def test_a_node_knows_which_default_environment_its_own_key_replaces(
    tmp_path: Path, node: str, overrides: list[str], note: str
) -> None:
    file = tmp_path / "c.yml"
    file.write_text(
        f"defaults: {{venv: /srv/venv}}\nnodes:\n  - gnn1\n  - {{host: gnn2, {node}}}\ndata: {{dataset: synthetic}}\n"
    )
    config = load_config(file, overrides)
    expected = note and f"{note.replace('FILE', str(file))} replaces `venv: /srv/venv` of `defaults`"
    assert [one.replaces for one in config.nodes] == ["", expected]
    assert load_config_of(to_yaml(config), tmp_path) == config and "replaces" not in to_yaml(config)


def load_config_of(text: str, folder: Path) -> ClusterConfig:
    (folder / "saved.yml").write_text(text)
    return load_config(folder / "saved.yml")


def test_the_note_on_an_environment_is_not_a_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("nodes: [{host: gnn1, replaces: x}]\ndata: {dataset: synthetic}\n")
    with pytest.raises(ConfigError, match="replaces"):
        load_config(file)
