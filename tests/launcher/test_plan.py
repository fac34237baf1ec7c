"""Tests of the plan: golden files, quoting in bash, secrets, ports, parts, threads, files."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from golden_kit import GOLDEN, check_text
from launcher.command import Command, is_secret, render, shell_line
from launcher.config.loader import load_config
from launcher.config.roles import part_block
from launcher.config.schema import NodeConfig, RunConfig
from launcher.files import CODE_ROOT
from launcher.plan.commands import train_flags
from launcher.plan.model import LaunchPlan
from launcher.plan.placement import interpreter
from launcher.plan.ports import candidate_ports
from launcher.plan.render import print_placement, print_plan
from launcher.plan.serialize import to_json
from launcher.run.tmux_session import how_to_stop
from plan_kit import PRODUCTS, TOKEN, cluster, facts_of, parts_folder, plan_of
from trainer.core.train_config import TrainConfig

# Golden plans


GOLDEN_CASES: dict[str, dict[str, Any]] = {
    "two_ssh_nodes": {},
    "two_ssh_nodes_after_preflight": {"facts": facts_of(2), "parts": 2},
    "unequal_procs_and_devices": {},
    "two_nodes_on_one_host": {"facts": facts_of(2)},
    "local": {},
    "own_command": {"own_command": ("python", "train.py", "--lr", "0.01", "conf.json"), "facts": facts_of(1)},
    "server_client": {"facts": facts_of(5), "parts": 6},
    "serving": {"facts": facts_of(2), "parts": 4, "serve_only": True},
    "attached": {"facts": facts_of(2), "serving": PRODUCTS},
}


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_plans(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "helpers").mkdir()
    for file in ("train.py", "conf.json", "helpers/util.py"):
        (tmp_path / file).write_text("1\n")
    config_file = tmp_path / "cluster.yml"
    config_file.write_text((GOLDEN / f"{name}.yml").read_text())
    case = dict(GOLDEN_CASES[name])
    parts = case.pop("parts", 0)
    manifest = parts_folder(tmp_path / "parts", parts) if parts else None
    plan = plan_of(load_config(config_file), manifest=manifest, cwd=tmp_path, **case)
    text = to_json(plan).replace(str(tmp_path), "HERE").replace(sys.executable, "PYTHON")
    found = _without_code(json.loads(text.replace(str(CODE_ROOT), "ROOT")))
    check_text(GOLDEN / f"{name}.json", json.dumps(found, indent=1) + "\n")


def _without_code(plan: dict[str, Any]) -> dict[str, Any]:
    # the sizes of gnnfleet's own files change with every commit
    assert {file["dest"] for file in plan.pop("code")} >= {
        "launcher/__init__.py",
        "launcher/node/supervisor/supervisor.py",
        "launcher/node/supervisor/rank_runner.py",
        "trainer/__init__.py",
    }
    for node in plan["nodes"]:
        for file in node["files"]:
            file["content"] = file["content"].splitlines()
    return plan


# Quoting in bash


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@settings(max_examples=15, deadline=None)
@given(words=st.lists(WORDS, max_size=5), value=WORDS)
def test_quoting_survives_bash(words: list[str], value: str) -> None:
    words = [word for word in words if not word.startswith("~/")]  # expanded by the shell
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ODD']]))"
    odd = value if not value.startswith("~/") else "x"
    command = Command((sys.executable, "-c", show, *words), {"ODD": odd})
    done = subprocess.run(["bash", "-c", render(command)], capture_output=True, check=True, timeout=30)
    assert json.loads(done.stdout) == [words, odd]


def test_start_script_and_node_json_quote_unusual_names(tmp_path: Path) -> None:
    home = tmp_path / 'it\'s $HOME `x` "q" é'
    stub = tmp_path / "sub dir" / "python"
    stub.parent.mkdir()
    stub.write_text(
        f"#!{sys.executable}\nimport json,os,sys\nprint(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))"
    )
    stub.chmod(0o755)
    env = {"ODD": "a'b\n$(c) * é", "EMPTY": ""}
    node = NodeConfig("localhost", workdir=str(home), python=str(stub), env=env, setup=("export SET='x y'",))
    plan = plan_of(cluster(node, transport="local"))
    placed = _place_generated(plan)
    found = json.loads(subprocess.run(["bash", placed["start.sh"]], capture_output=True, check=True, timeout=30).stdout)
    run_dir = plan.nodes[0].run_dir
    assert run_dir.startswith(str(home)) and found[2] == run_dir
    assert found[0] == [
        str(stub),
        "-S",
        f"{plan.nodes[0].code_dir}/launcher/node/supervisor/supervisor.py",
        f"{run_dir}/node.json",
    ]
    assert found[1].items() >= {**env, "SET": "x y"}.items()
    assert found[1]["PATH"].startswith(f"{stub.parent}:")
    spec = json.loads(placed["node.json"].read_text())
    assert spec["trainer"]["argv"] == list(plan.nodes[0].trainer.argv)
    assert spec["trainer"]["env"].items() >= env.items()


def _place_generated(plan: LaunchPlan) -> dict[str, Path]:
    placed = {}
    for file in plan.nodes[0].files:
        if file.content:
            path = Path(file.dest)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content.encode())
            assert path.stat().st_size == file.bytes
            placed[path.name] = path
    return placed


def test_home_is_expanded_by_the_shell_before_preflight_finds_it(tmp_path: Path) -> None:
    start = plan_of(cluster(NodeConfig("a", venv="~/my venv"))).nodes[0].start
    show = dataclasses.replace(start, argv=("bash", "-c", 'echo "$PYTHONPATH|$PATH|$PWD"'))
    run_dir = tmp_path / "gnnfleet-work/node0/runs/r1/node0"
    run_dir.mkdir(parents=True)
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", render(show)], env=env, capture_output=True, check=True, text=True, timeout=30)
    pythonpath, path, cwd = done.stdout.strip().split("|")
    assert pythonpath == f"{tmp_path}/gnnfleet-work/node0/code/{'c0de' * 4}"
    assert path.startswith(f"{tmp_path}/my venv/bin:") and cwd == str(run_dir)


LOGIN_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "mksh", "csh", "tcsh", "fish")
HOSTILE = "a  b\n!! !x \\n \\ 'q' \"d\" $HOME `id` {a,b} ~ # ^a^b %1 & ; é * "


@pytest.mark.parametrize("shell", LOGIN_SHELLS)
def test_a_command_is_the_same_in_every_login_shell(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} on this machine (apt install {shell})")
    folder = tmp_path / "it's !1"
    folder.mkdir()
    code = "import os, sys\nprint([sys.argv[1:], os.environ['ODD'], os.getcwd()])"
    argv = (sys.executable, "-c", code, HOSTILE, "", "x" * 900)
    command = Command(argv, {"ODD": HOSTILE}, str(folder), ("export ODD=", 'test "$#" = 0'))
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", shell_line(command)], env=home, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert ast.literal_eval(done.stdout) == [[HOSTILE, "", "x" * 900], HOSTILE, str(folder)]


def test_a_program_in_the_home_folder_does_not_import_the_work_folder_as_gnnfleet(tmp_path: Path) -> None:
    (tmp_path / NodeConfig("a").workdir.removeprefix("~/")).mkdir(parents=True)
    code = "import importlib.util; print(importlib.util.find_spec('gnnfleet'))"
    argv = [sys.executable, "-S", "-c", code]  # -S: without the packages installed here
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "None\n"


def test_conda_environment_by_name_is_activated_or_reported_missing(tmp_path: Path) -> None:
    command = interpreter(cluster(NodeConfig("a", conda="my env")), 0)
    show = dataclasses.replace(command, argv=("bash", "-c", "echo $ACTIVE"))
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", render(show)], env=env, capture_output=True, text=True, timeout=30)

    missing = run()
    assert missing.returncode == 127 and "conda was not found" in missing.stderr
    script = tmp_path / "miniforge3/etc/profile.d/conda.sh"
    script.parent.mkdir(parents=True)
    script.write_text('conda() { export ACTIVE="$1 $2"; }\n')
    assert run().stdout == "activate my env\n"


# Secrets


def test_a_plan_shows_no_secret_of_env() -> None:
    env = {"WANDB_API_KEY": "hush 1", "AWS_SECRET_ACCESS_KEY": "hush/2", "TOKENIZERS_PARALLELISM": "false", "KEYS": "3"}
    env |= {"DB_PW": "hush", "Authorization": "Bearer hush", "https_proxy": "http://me:hush@proxy:3128"}
    nodes = tuple(dataclasses.replace(node, env=env) for node in cluster().nodes)
    plan = plan_of(cluster(*nodes), facts=facts_of(2))
    console = Console(file=io.StringIO(), width=200)
    print_plan(plan, console, every=True)
    assert isinstance(console.file, io.StringIO)
    for shown in (console.file.getvalue(), to_json(plan)):
        assert "hush" not in shown and "WANDB_API_KEY" in shown and "false" in shown
    start = next(file.content for file in plan.nodes[0].files if file.dest.endswith("start.sh"))
    assert "export WANDB_API_KEY='hush 1'" in start  # the host gets it


@pytest.mark.parametrize(
    ("variable", "secret"),
    [
        *(
            (f"{name}=x", True)
            for name in ("PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "WANDB_APIKEY", "API_KEY_2", "JWT")
        ),
        *((f"{name}=x", True) for name in ("CLIENTSECRET", "AUTHTOKEN", "AWS_CREDS", "SLACK_WEBHOOK", "pgpassword")),
        *(
            (f"{name}=x", False)
            for name in ("PWD", "OLDPWD", "KEYBOARD", "KEYS", "AUTHOR", "MAX_TOKENS", "PATH", "SAS")
        ),
        ("GNNFLEET_TOKEN=x", False),  # masked by its type
        ("DATA=https://store/x?se=2026&sig=abc", True),
        ("DATA=https://store/x?X-Amz-Signature=abc", True),
        ("HEADERS=Authorization: Bearer abcdefgh", True),
        ("DATA=https://store/x?page=2", False),
        ("MODE=bearer x", False),
    ],
)
def test_secrets_among_variables(variable: str, secret: bool) -> None:
    assert is_secret(*variable.split("=", 1)) == secret


def test_the_token_is_shown_nowhere_but_in_node_json(tmp_path: Path) -> None:
    plan = plan_of(cluster(), facts=facts_of(2))
    console = Console(file=io.StringIO(), width=80)
    print_plan(plan, console, every=True)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert TOKEN.reveal() not in to_json(plan) + repr(plan) + shown
    assert "GNNFLEET_TOKEN=***" in shown and '"GNNFLEET_TOKEN": "***"' in to_json(plan)
    holders = [file for file in plan.nodes[0].files if TOKEN.reveal().encode() in file.content.encode()]
    assert [(Path(file.dest).name, file.secret, oct(file.mode)) for file in holders] == [("node.json", True, "0o600")]
    keys = [file for file in plan.nodes[0].files if file.dest.endswith("service.key")]
    assert [(file.content, file.source, file.secret, oct(file.mode)) for file in keys] == [("", "", True, "0o600")]


@pytest.mark.parametrize(
    ("transport", "encrypt", "expected"),
    [("ssh", "auto", True), ("ssh", "off", False), ("local", "auto", False), ("local", "on", True)],
)
def test_encryption(transport: Any, encrypt: Any, expected: bool) -> None:
    nodes = (NodeConfig("localhost"), NodeConfig("localhost"))
    node = plan_of(cluster(*nodes, transport=transport, run=RunConfig(encrypt=encrypt))).nodes[0]
    assert node.server is not None
    assert ("--key-file" in node.server.argv) == expected
    assert any(file.dest.endswith("service.key") for file in node.files) == expected
    assert ("GNNFLEET_SERVICE_KEY" in node.trainer.env) == expected


# Ports, parts, threads


def test_nodes_never_share_a_port() -> None:
    for service in ("auto", 29500, 29496, 29400, 29380):
        config = cluster(*(NodeConfig("one") for _ in range(64)), run=RunConfig(service_port=service))  # type: ignore[arg-type]
        every = [port for k in range(64) for port in candidate_ports(config, k)]
        assert len(every) == len(set(every)) and max(every) < 65536


def test_busy_ports_are_skipped() -> None:
    plan = plan_of(cluster(), facts=facts_of(2, free_ports=(29503, 29602, 29603)))
    assert plan.master_port == 29503
    assert [node.service_port for node in plan.nodes] == [29602, 29603]
    fixed = cluster(run=RunConfig(master_port=1234, service_port=5000, control_port=1235))
    assert candidate_ports(fixed, 0) == (1234, 1235, 5000) and candidate_ports(fixed, 1) == (5001,)
    assert candidate_ports(cluster(NodeConfig("a")), 0) == tuple(range(29500, 29564))


@given(nodes=st.integers(1, 70), more=st.integers(0, 100))
def test_parts_are_contiguous_and_balanced(nodes: int, more: int) -> None:
    blocks = [part_block(k, nodes, nodes + more) for k in range(nodes)]
    assert [part for block in blocks for part in block] == list(range(nodes + more))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1 and min(map(len, blocks)) >= 1


def test_processes_of_one_host_share_its_cpus() -> None:
    nodes = (
        NodeConfig("a", procs=3),
        NodeConfig("A"),
        NodeConfig("b", procs=40),
        NodeConfig("c", env={"OMP_NUM_THREADS": "7"}),
    )
    plan = plan_of(cluster(*nodes), facts=facts_of(4))
    assert [node.trainer.env["OMP_NUM_THREADS"] for node in plan.nodes] == ["4", "4", "1", "7"]


def test_a_single_node_runs_no_graph_server() -> None:
    node = plan_of(cluster(NodeConfig("a"))).nodes[0]
    assert node.server is None and not any("service.key" in file.dest for file in node.files)
    described = next(json.loads(file.content) for file in node.files if file.dest.endswith("cluster.json"))
    assert described["nodes"] == [
        {"node_rank": 0, "host": "a", "role": "worker", "endpoint": None, "parts": [0], "ranks": [0]}
    ]


def test_ipv6_endpoints_have_brackets() -> None:
    node = plan_of(cluster(NodeConfig("a", address="fd00::1"), NodeConfig("b")), facts=facts_of(2)).nodes[0]
    assert node.server is not None and "tcp://[fd00::1]:29600" in node.server.argv


# Files


def test_home_in_env_is_that_of_the_node() -> None:
    node = NodeConfig("a", env={"DATA": "~/d", "PYTHONPATH": "~/lib"})
    plan = plan_of(cluster(node, NodeConfig("b")), facts=facts_of(2, home="/home/ann")).nodes[0]
    assert plan.trainer.env["DATA"] == plan.start.env["DATA"] == "/home/ann/d"
    assert plan.start.env["PYTHONPATH"] == f"{plan.code_dir}:/home/ann/lib"
    site = f"{plan.code_dir}/launcher/node/site"
    assert plan.trainer.env["PYTHONPATH"] == f"{site}:{plan.start.env['PYTHONPATH']}"


@pytest.mark.parametrize(
    ("node", "target", "ssh"),
    [
        (NodeConfig("gnn1", user="ann", port=2222), "ann@gnn1:2222", 'ssh -p 2222 ann@gnn1 "tmux'),
        (NodeConfig("2001:db8::5", user="ann"), "ann@2001:db8::5", 'ssh ann@2001:db8::5 "tmux'),
        (NodeConfig("2001:db8::5", user="ann", port=22), "ann@[2001:db8::5]:22", 'ssh -p 22 ann@2001:db8::5 "tmux'),
        (NodeConfig("::1", port=7), "[::1]:7", 'ssh -p 7 ::1 "tmux'),
    ],
)
def test_login_target_and_ssh_command_of_a_node(node: NodeConfig, target: str, ssh: str) -> None:
    plan = plan_of(cluster(node)).nodes[0]
    assert plan.target == target and ssh in how_to_stop(plan)


# The trainer's side of the command line


def test_train_flags_are_accepted_by_the_trainer() -> None:
    from trainer.train.settings import TrainSettings, settings_options

    @click.command()
    @settings_options
    def train(**values: Any) -> None: ...

    wanted = TrainConfig(fanouts=(-1, 5), eval_fanouts=(-1, -1), replace=True, lr=1e-5, layers=2, model="gat")
    values = train.make_context("train", train_flags(wanted)).params
    assert TrainSettings(**values) == TrainSettings(**dataclasses.asdict(wanted))
    assert dataclasses.asdict(TrainSettings()) == dataclasses.asdict(TrainConfig())


# The whole plan


def test_json_is_complete() -> None:
    plan = plan_of(cluster(), facts=facts_of(2))
    found = json.loads(to_json(plan))
    assert set(found) == {field.name for field in dataclasses.fields(LaunchPlan)}
    assert found["nodes"][1]["trainer"]["argv"] == list(plan.nodes[1].trainer.argv)
    assert sum(file["bytes"] for file in found["nodes"][0]["files"]) == sum(file.bytes for file in plan.nodes[0].files)


def test_printed_plan_has_every_command_of_every_node(tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.write_text("print(1)")
    nodes = (NodeConfig("a", user="u", port=2222, devices=(1, 3), setup=("module load cuda",)), NodeConfig("b"))
    plan = plan_of(cluster(*nodes), own_command=("python", "my script.py"), cwd=tmp_path)
    console = Console(file=io.StringIO(), width=80)
    print_plan(plan, console, every=True)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for node in plan.nodes:
        assert f"node{node.node_rank}  {node.target}  tmux session {node.session}" in shown
        assert node.server is not None
        for command in (node.start, node.server, node.trainer):
            assert render(dataclasses.replace(command, env={}, setup=(), cwd="")).rpartition("exec ")[2] in shown
    for expected in ("u@a:2222", "ranks 0-1", "devices 1,3", "module load cuda", "CUDA_VISIBLE_DEVICES=1,3"):
        assert expected in shown
    assert "my script.py (8 bytes)" in shown and "service.key (made at launch)" in shown
    assert "partition make" in shown and all(note in shown for note in plan.notes)


def test_a_launch_prints_one_line_of_placement_per_node() -> None:
    plan = plan_of(cluster(NodeConfig("a", user="u", devices=(1, 3)), NodeConfig("b")), facts=facts_of(2))
    console = Console(file=io.StringIO(), width=100)
    print_placement(plan, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (
        lines[0]
        == f"run {plan.run_id}: 2 nodes, 3 processes, 2 parts, master {plan.master_addr} port {plan.master_port}"
    )
    assert lines[2].split()[:5] == ["node0", "u@a", "0-1", "1,3", "0"]
    assert lines[3].split()[:5] == ["node1", "b", "2", "CPU", "1"]


@pytest.mark.parametrize("template", sorted((CODE_ROOT / "templates").glob("*.yml")), ids=lambda path: path.name)
def test_plans_of_the_templates_are_valid(template: Path) -> None:
    config = load_config(template)
    plan = plan_of(config)
    assert plan.world_size == sum(len(node.ranks) for node in plan.nodes) >= 2
    assert not plan.final and plan.notes


def test_the_same_input_gives_the_same_plan() -> None:
    assert plan_of(cluster(), facts=facts_of(2)) == plan_of(cluster(), facts=facts_of(2))


@pytest.mark.parametrize(
    ("flags", "devices", "expected"),
    [
        ("avx512_bf16", (), r"on node0–node1: the processor multiplies it \(avx512_bf16\); an epoch took 8 % less"),
        ("", (), "on node0–node1: the processor has no instructions for it .* slower than in float32"),
        (None, ("Tesla T4",), "on node0–node1: Tesla T4 has no units for it"),
        (None, ("NVIDIA A100-SXM4-40GB",), None),
        (None, ("NVIDIA H100 80GB HBM3",), None),
    ],
)
def test_the_plan_says_what_bfloat16_brings(flags: str | None, devices: tuple[str, ...], expected: str | None) -> None:
    nodes = [NodeConfig(name, devices=(0,) if devices else ()) for name in "ab"]
    config = cluster(*nodes, train=TrainConfig(precision="bfloat16"))
    plan = plan_of(config, facts=facts_of(2, bfloat16=flags, devices=devices))
    found = [note for note in plan.notes if "bfloat16" in note]
    assert len(found) == (expected is not None) and all(re.search(str(expected), note) for note in found)
    assert not any("bfloat16" in note for note in plan_of(cluster(*nodes), facts=facts_of(2, bfloat16=flags)).notes)
