"""Tests of reading files of other launchers.

Each folder of golden/foreign has a file of another launcher, a command line, and the cluster.yml that ``gnnfleet
import`` writes for that file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from golden_kit import GOLDEN, check_messages, check_text
from launcher.cli.launch_compat import imported
from launcher.cli.main import run
from launcher.config.importers.base import Flags
from launcher.config.importers.detect import read_foreign
from launcher.config.importers.pyg_command import parse_remote
from launcher.config.loader import load_config
from launcher.errors import ConfigError, FleetError, UsageError
from launcher.files import CODE_ROOT
from launcher.run.config_of_options import read_config
from launcher.run.options import LaunchOptions
from waiting import stretched

CASES = sorted(path for path in (GOLDEN / "foreign").iterdir() if path.is_dir())


def options_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> LaunchOptions:
    seen: list[LaunchOptions] = []
    monkeypatch.setattr("launcher.cli.main.show_plan", seen.append)
    assert run(["--dry-run", *words]) == 0
    return seen[0]


@pytest.fixture
def ansible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a program ``ansible-inventory`` on PATH, which runs the lines of shell given."""

    def install(lines: str) -> None:
        program = tmp_path / "bin" / "ansible-inventory"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    return install


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_import_writes_an_equivalent_config(
    case: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ansible: Callable[[str], None],
) -> None:
    # The cluster.yml that the import writes equals the golden file, and gives the same config as the other launcher's
    # file.
    monkeypatch.chdir(case)
    if (case / "listing.json").exists():
        ansible("cat listing.json")
    words = shlex.split((case / "words").read_text())
    options = options_of(words, monkeypatch)
    written = imported(options, case)
    golden = case / "cluster.yml"
    heading = "".join(f"# own command: {word}\n" for word in options.own_command)
    check_text(golden, heading + written)
    assert load_config(golden) == read_config(options)
    elsewhere = tmp_path / "cluster.yml"
    elsewhere.write_text(imported(options, tmp_path))
    assert load_config(elsewhere) == read_config(options)


#: Hostfile → its hosts with their processes and SSH ports, as docs/migrating.md lists them.
HOSTFILES = {
    "a slots=4\nb slots=2 max_slots=8\n": "a:4 b:2",  # OpenMPI
    "a slots=4 max-slots=4\na slots=1\n": "a:5",
    "a slots = 4 # comment\n\n# comment\nme@corp@b slots=2\n": "a:4 me@corp@b:2",  # DeepSpeed, Horovod
    "a:8\nb:2\n": "a:8 b:2",  # MPICH/Hydra, Intel MPI
    "gnn1:8\n": "gnn1:8",
    "a:8\nb\na:1\n": "a:9 b:1",
    "n1.lab\nn1.lab\nn2.lab\nn1.lab\n": "n1.lab:3 n2.lab:1",  # PBS, Torque, LSF
    "a\na\n": "a:2",
    "n1.lab\nn2.lab\n": "n1.lab n2.lab",
    "node[01-03,07]\nb\n": "node01 node02 node03 node07 b",  # Slurm
    "10.0.0.1 30050\n10.0.0.2 30050\n": "10.0.0.1 10.0.0.2",  # DGL
    "- 10.0.0.1 1234\n- 10.0.0.2\n": "10.0.0.1 10.0.0.2",  # torch_geometric
    "me@a:2222\nb:2201\n": "me@a/2222 b/2201",
    "n1.lab 4 all.q@n1.lab UNDEFINED\nn2.lab 2 all.q@n2.lab 0,0:0,1\n": "n1.lab:4 n2.lab:2",  # SGE, $PE_HOSTFILE
    "n1 4 n2 2\n": "n1:4 n2:2",  # LSF, $LSB_MCPU_HOSTS
    "n1 n1 n2\n": "n1:2 n2:1",  # LSF, $LSB_HOSTS
    "n1/0*4+n2/0\n": "n1:4 n2:1",  # PBS, exec_host
    "n1/0+n1/1+n2/0\n": "n1:2 n2:1",  # Torque
    "n1/0-3,6+n2/0-1\n": "n1:5 n2:2",
    "n[1-3]\nn2\n": "n1:1 n2:2 n3:1",
    "n[1-2]:4\nn2:2\n": "n1:4 n2:6",
    "gpu1 gpu2 gpu2\n": "gpu1:1 gpu2:2",
    "n1:4,n2:2\n": "n1:4 n2:2",  # Horovod's -H
    "n1,n[2-3]\n": "n1 n2 n3",
    "[fe80::1]:8\n[fe80::2]:8\n": "fe80::1:8 fe80::2:8",
    "[fe80::1]\nme@[fe80::2]\n": "fe80::1 me@fe80::2",
    "fe80::1\nfe80::2\n": "fe80::1 fe80::2",
    "fe80::1 slots=4\n[fe80::2] slots=2\n": "fe80::1:4 fe80::2:2",
    "me@[fe80::1]:2222\n": "me@fe80::1/2222",
    "\ufeffn1 slots=4\r\nn2 slots=2\r\n": "n1:4 n2:2",
}


@pytest.mark.parametrize("content", HOSTFILES)
def test_forms_of_hostfiles(content: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(content)
    nodes = load_config(tmp_path / "hosts", ("data.dataset=synthetic",)).nodes
    shown = (replace(node, port=None).login + (f"/{node.port}" if node.port else "") for node in nodes)
    found = " ".join(f"{login}:{node.procs}" if node.procs else login for login, node in zip(shown, nodes, strict=True))
    assert found == HOSTFILES[content]


def documented_host_lines() -> list[tuple[str, str]]:
    """Return (host list, what it becomes) of each example in the table of host lists in docs/migrating.md."""
    page = (CODE_ROOT / "docs/migrating.md").read_text()
    table = page.partition("| line | from | becomes |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
    return [
        (f"{line}\n" * (4 if "four times" in lines else 1), becomes)
        for lines, _, becomes in rows
        for line in re.findall("`([^`]+)`", lines)
    ]


@pytest.mark.parametrize(("content", "becomes"), documented_host_lines())
def test_lines_of_the_migration_guide(content: str, becomes: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(content if len(content) > 5 else f"{content}gnn2\n")  # one word may be any text
    nodes = load_config(tmp_path / "hosts", ("data.dataset=synthetic",)).nodes
    if re.fullmatch(r"\d+( and \d+)* processes", becomes):
        assert [node.procs for node in nodes] == [int(number) for number in re.findall(r"\d+", becomes)]
        return
    assert all(node.procs is None for node in nodes)
    assert len(nodes) == (5 if becomes.startswith("five nodes") else 2 if len(content) <= 5 else 1)
    assert nodes[0].port == (2222 if "SSH port" in becomes else None)


NO_LIST = "hosts:1: expected keys such as `nodes:` and `data:`, or one host per line, as `gnn1` or `gnn1 slots=8`"
AMBIGUOUS = {  # hostfile → the end of its only message
    "a slots=2\nb lots=8\n": "hosts:2: unknown word `lots`; did you mean `b slots=8`?",
    "a np=8\n": "hosts:1: unknown word `np`; did you mean `a slots=8`?",
    "a max_slots=4\n": "hosts:1: `a max_slots=4` may mean 4 slots or fewer; write `a slots=4`",
    "a slots=4\nb\n": "hosts:2: `b` may mean one slot, or one per core; write `b slots=1`",
    "a slots=4\nb:8\n": "hosts:2: `b:8` is no line of a file with slots; write `b slots=8`",
    "a slots=4 max_slots=2\n": "hosts:1: slots=4 is more than 2, the maximum on this line",
    "a slots=4 slots=8\n": "hosts:1: `a slots=4 slots=8` has the same word twice; leave one",
    "a slots=-1\n": "hosts:1: expected `host slots=4`, found `a slots=-1`",
    "gnn1:8 ifhn=10.0.0.1\n": "hosts:1: expected `host slots=4`, found `gnn1:8 ifhn=10.0.0.1`",
    "a slots=0\n": "hosts:1: expected `host slots=4`, found `a slots=0`",
    "a:8 slots=4\n": "hosts:1: `a:8` and slots=4 are two numbers of processes; write `a slots=4`",
    "gnn1:22\ngnn2:22\n": "write `gnn2 slots=22`, for the port `gnn2`",
    "a:8\nb:2222\n": "and the file has both; write `host slots=N`, and ports into ~/.ssh/config",
    "10.0.0.1 gnn1 gnn1.lab\n": NO_LIST,  # /etc/hosts
    "gnn1 slots:8\n": NO_LIST,
    "n1 slots=8 gpus=4\n": "only slots and max_slots are read; leave it out, or write a cluster.yml (gnnfleet import)",
    "- n1:8\n": "`n1:8` may mean an SSH port or 8 processes; write the host alone, and the key `port: 8` or `procs: 8`",
    "n1*4\n": NO_LIST,
    "n1 // all\n": NO_LIST,
    **dict.fromkeys(("gnn1 x8\n", "gnn1 8procs\n", "gnn1 slots8\n", "gnn1 gpu:8\n", "gnn [1-3]\n"), NO_LIST),
    **dict.fromkeys(("gnn1,8\ngnn2,4\n", "gnn1,x8\n", "10.0.0.1,30050\n", "8\n9\n", "gnn1/8\n", "gnn[1-2]/4"), NO_LIST),
    "gnn1.lab\ngnn2/4\n": "hosts:2: expected a host and an optional port, found `gnn2/4`",
    "a:4 binding=user:4,5\n": "hosts:1: expected `host slots=4`, found `a:4 binding=user:4,5`",
    "n1/3-0+n2/0\n": "hosts:1: expected `host slots=4`, found `n1 slots=-2`",
    "n1 4\nn2 4\n": "hosts:2: `n2 4`: 4 is no port of a DGL server; for 4 processes write `n2 slots=4`",
}


@pytest.mark.parametrize(
    ("value", "there"),
    [("x y", "x y"), ("a;id", "a;id"), ("$(id)", "$(id)"), ("`id`", "`id`"), ('a"b\\', 'a"b\\'), ("{a,b}", "{a,b}")]
    + [("$HOME/x y", "/h/x y"), ("/lib:${HOME}", "/lib:/h"), ("~/x", "/h/x"), ("", "")],
)
def test_extra_variables_are_values_and_not_shell_code(value: str, there: str, tmp_path: Path) -> None:
    (tmp_path / "ip").write_text("- 10.0.0.1 1234\n")
    found = read_foreign(tmp_path / "ip", Flags(dataset="synthetic", extra_envs=(f"B={value}",)))
    (line,) = load_config(tmp_path / "ip", ("data={dataset: synthetic}",), foreign=found).nodes[0].setup
    command = ["bash", "-c", f'{line}\nprintf %s "$B"']
    assert subprocess.run(command, env={"HOME": "/h"}, capture_output=True, text=True).stdout == there
    with pytest.raises(UsageError, match="--extra_envs A B=1: give variables as NAME=value"):
        read_foreign(tmp_path / "ip", Flags(dataset="synthetic", extra_envs=("A B=1",)))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "cd /x; python a.py --rank $RANK",
            "write `$RANK` without a variable, as the script is started without a shell",
        ),
        ("python a.py --at=`date`", "write `--at=`date`` without a variable"),
        ("cd /x; python", "expected `python script.py` in it"),
    ],
)
def test_quoted_commands_that_need_a_shell_are_refused(command: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_remote(command)


@pytest.mark.parametrize("content", AMBIGUOUS)
def test_hostfiles_with_two_meanings_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(content)
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "hosts", ("data.dataset=synthetic",))
    assert str(refused.value).endswith(AMBIGUOUS[content])


GLT = "nodes: [a, b]\nports: [22, 22]\nusernames: [u, v]\ndataset: synthetic\n"


@pytest.mark.parametrize("devices", ["[[-1], [0, 1]]", "['-1', '0,1']", "['', [0, 1]]"])
def test_a_node_of_glt_without_devices_trains_on_its_cpu(devices: str, tmp_path: Path) -> None:
    (tmp_path / "glt.yml").write_text(f"{GLT}visible_devices: {devices}\n")
    assert [node.devices for node in load_config(tmp_path / "glt.yml").nodes] == [(), (0, 1)]


WRONG = {  # content of a file `hosts`, and the arguments after --config hosts
    "lists of different length": ("nodes: [a, b]\nports: [22]\nusernames: [u, v, w]\ndataset: synthetic\n", ""),
    "ranks that are none": (f"{GLT}node_ranks: [1, 2]\n", ""),
    "a port that is none": (GLT.replace("22]", "ssh]"), ""),
    "keys of both": (f"{GLT}train: {{lr: 1}}\n", ""),
    "a folder that is none": (f"{GLT}dst_paths: [/here, there]\n", ""),
    "no list": (GLT.replace("[u, v]", "u"), ""),
    "fewer hosts than told": ("- 10.0.0.1 1\n- 10.0.0.2 1\n", "--num_nodes 3 --dataset synthetic"),
    "no graph": ("10.0.0.1\n10.0.0.2\n", ""),
    "a bad line of a list": ("10.0.0.1\n\n10.0.0.2 x y\n", "--dataset synthetic"),
    "slots that are none": ("a slots=2\nb slots=many\n", "--dataset synthetic"),
    "a group of what has none": ("10.0.0.1\n", "--group a --dataset synthetic"),
    "a pipe": ("- 10.0.0.1 1\n", "--dataset synthetic 'python e2e_homo.py | tee log'"),
    "no script": ("- 10.0.0.1 1\n", "--dataset synthetic 'cd /x; ./python x.sh; make '"),
    "a variable of the node": ("- 10.0.0.1 1\n", "--dataset synthetic 'cd $WHERE; python x.py'"),
    "two commands": ("- 10.0.0.1 1\n", "--dataset synthetic 'python x.py' -- python y.py"),
    "two environments": ("- 10.0.0.1 1\n", "--dataset synthetic --venv ~/a --conda b"),
    "two files": ("- 10.0.0.1 1\n", "--ip_config hosts --dataset synthetic"),
}


HUGE = {  # text that would take unbounded time if nothing limited it → beginning of the message
    "x" * 5000 + "\n10.0.0.1\n": "1: the line has 5,000 characters",
    "a slots=" + "9" * 5000 + "\n": "1: the line has 5,008 characters",
    "a slots=" + "9" * 50 + "\n": "1: expected `host slots=4`",
}


@pytest.mark.parametrize("text", HUGE, ids=lambda text: f"{len(text)}-{text[:20]!r}")
def test_oversized_input_is_refused_within_seconds(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "hosts", ("data.dataset=synthetic",))
    assert str(refused.value).startswith(f"{tmp_path}/hosts:{HUGE[text]}")
    assert time.monotonic() - began < stretched(20)


def test_mistakes_are_reported_with_their_line_in_the_foreign_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = []
    for name, (content, words) in WRONG.items():
        Path("hosts").write_text(content)
        assert run(["--dry-run", "--config", "hosts", *shlex.split(words)]) == 2, name
        answers.append((f"{name}: --config hosts {words}".rstrip(), capsys.readouterr().err))
    check_messages("foreign", answers)


INVENTORY = "[a]\nx1\n[b]\nx2\n"
LISTING = {
    "_meta": {"hostvars": {}},
    "all": {"children": ["ungrouped", "a", "b"]},
    "a": {"hosts": ["x1"]},
    "b": {"hosts": ["x2"]},
}
INVENTORIES = {  # what ansible-inventory does, and the arguments after --config hosts
    "several groups": (LISTING, ""),
    "a group that is not there": (LISTING, "--group c"),
    "a group without hosts": ({"_meta": {"hostvars": {}}, "all": {"children": ["ungrouped", "a"]}}, "--group a"),
    "a template": ({**LISTING, "_meta": {"hostvars": {"x2": {"ansible_host": "{{ ip }}"}}}}, "--group b"),
    "a host in a container": (
        {**LISTING, "_meta": {"hostvars": {"x1": {"ansible_connection": "docker"}}}}, "--group a"
    ),
    "a port that is none": ({**LISTING, "_meta": {"hostvars": {"x1": {"ansible_port": "ssh"}}}}, "--group a"),
    "an inventory that Ansible refuses": (
        "printf '[WARNING]: Failed to parse it: Expected key=value, got: y\n\nmore\n' >&2; exit 1", ""
    ),
    "an inventory with a byte order mark": ("echo Failed to parse it >&2; exit 1", "--group a"),
    "no JSON": ("echo ok", ""),
    "no Ansible": (None, ""),
}  # fmt: skip


def test_inventories_that_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ansible: Callable[[str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = []
    for name, (does, words) in INVENTORIES.items():
        Path("hosts").write_text("\ufeff" * ("byte order" in name) + INVENTORY)
        if isinstance(does, dict):
            Path("listing.json").write_text(json.dumps(does))
            ansible("cat listing.json")
        elif does:
            ansible(does)
        else:
            monkeypatch.setattr(shutil, "which", lambda *given, **more: None)
        assert run(["--dry-run", "--config", "hosts", *shlex.split(words), "--dataset", "synthetic"]) == 2, name
        answers.append((f"{name}: --config hosts {words}".rstrip(), capsys.readouterr().err))
    check_messages("inventories", answers)


def test_warnings_of_ansible_are_notes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ansible: Callable[[str], None],
) -> None:
    # Ansible has read the file only once, and has not run it.
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(INVENTORY)
    Path("listing.json").write_text(json.dumps({**LISTING, "_meta": {"hostvars": {"x1": {"slots": 4}}}}))
    ansible(
        'echo "$ANSIBLE_INVENTORY_ENABLED $*" >>asked; echo "[WARNING]: Skipping key (x)" >&2; exec cat listing.json'
    )
    assert run(["--dry-run", "--config", "hosts", "--group", "b,a", "--dataset", "synthetic"]) == 0
    shown = capsys.readouterr()
    assert "hosts: recognised as an Ansible inventory, group b, a (2 hosts)" in shown.err
    assert "note: ansible-inventory: Skipping key (x)" in shown.err
    assert "note: slots of hosts is not used; add --set 'nodes.*.procs=4'" in shown.err
    assert "node0  x2" in shown.out and "node1  x1" in shown.out
    assert Path("asked").read_text() == f"ini -i {tmp_path}/hosts --list\n"


@pytest.mark.skipif(shutil.which("ansible-inventory") is None, reason="ansible-core is not installed")
@pytest.mark.parametrize(
    "case", [case for case in CASES if (case / "listing.json").exists()], ids=lambda case: case.name
)
def test_inventories_that_ansible_reads(case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split((case / "words").read_text())
    folder = shutil.copytree(case, tmp_path / "case")
    (folder / "group_vars").mkdir()
    (folder / "group_vars/gpu.yml").write_text("ansible_ssh_private_key_file: ~/gpu_key\n")
    monkeypatch.chdir(folder)
    config, golden = read_config(options_of(words, monkeypatch)), load_config(case / "cluster.yml")
    assert [node.login for node in config.nodes] == [node.login for node in golden.nodes]
    assert str(Path.home() / "gpu_key") in {node.key for node in config.nodes}


SAMPLES = {
    "dist_train_sage_sup_config.yml": "glt/dist_train_sage_sup_config.yml", "ip_config.yaml": "pyg/ip_config.yaml",
    "ip_config.txt": "dgl/ip_config.txt", "hosts": "hostfile/hostfile", "hosts.ini": "ansible_ini/hosts",
    "inventory.ini": "ansible_ini/hosts",
}  # fmt: skip


def documented_commands() -> list[str]:
    text = (CODE_ROOT / "docs/migrating.md").read_text().replace("\\\n", "").replace("$PWD", ".")
    rows = re.findall(r"`(python launch\.py [^`]*)` \|$", text, re.MULTILINE)
    blocks = "".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return rows + re.findall(r"^(?:python launch\.py|gnnfleet) .*$", blocks, re.MULTILINE)


@pytest.mark.parametrize("command", documented_commands())
def test_commands_of_the_migration_guide_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ansible: Callable[[str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    ansible(f"cat {GOLDEN}/foreign/ansible_ini/listing.json")
    for name, sample in SAMPLES.items():
        Path(name).write_text((GOLDEN / "foreign" / sample).read_text())
    for name in ("graph.pt", "train.py"):
        Path(name).touch()
    monkeypatch.setattr("launcher.run.check.run_check", lambda config, *more, **named: 0)
    words = shlex.split(command.replace("python launch.py", "gnnfleet"))[1:]
    assert run(words if words[0] in ("check", "import") else ["--dry-run", *words]) == 0


def test_the_migration_guide_has_commands_for_each_launcher() -> None:
    assert len(documented_commands()) >= 8


def test_a_batch_size_per_process_is_multiplied_by_the_processes_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(GOLDEN / "foreign/glt")
    file = "dist_train_sage_sup_config.yml"
    options = options_of(["--config", file, "--batch_size", "512"], monkeypatch)
    assert read_config(options).train.batch_size == 512 * 6
    assert f"{file}: recognised as GLT's YAML (2 hosts)" in capsys.readouterr().err
    assert read_config(replace(options, include=("10.0.0.2",))).train.batch_size == 512 * 2
    on_cpu = options_of(["--config", file, "--batch_size", "512", "--set", "nodes.*.devices=[]"], monkeypatch)
    assert read_config(on_cpu).train.batch_size == 512 * 2
    ours = options_of(["--config", file, "--set", "train.batch_size=700"], monkeypatch)
    assert read_config(ours).train.batch_size == 700


def test_nodes_and_dataset_options_change_a_cluster_yml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("graph.pt").touch()
    Path("cluster.yml").write_text(
        "nodes: 2\ntransport: local\ndefaults: {venv: ~/v}\n"
        "data: {dataset: synthetic, options: {num_nodes: 9}, folder: parts/old}\n"
    )
    words = [
        "--config",
        "cluster.yml",
        "--nodes",
        "me@a,b",
        "--dataset",
        "graph.pt",
        "--set",
        "data.options.undirected=true",
    ]
    config = read_config(options_of(words, monkeypatch))
    assert [(node.login, node.venv) for node in config.nodes] == [("me@a", "~/v"), ("b", "~/v")]
    assert (config.transport, config.data.dataset, config.data.source) == ("ssh", "file", str(tmp_path / "graph.pt"))
    assert (config.data.options, config.data.folder) == ({"undirected": True}, str(tmp_path / "parts/graph"))


def test_an_environment_option_replaces_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `--venv` or `--conda` replaces the settings python, venv and conda of all nodes. A shell may have expanded ~ in
    # the path to the local home folder; on each node, the path starts in the home folder of that host.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("cluster.yml").write_text(
        "nodes: [a, {host: b, conda: old}]\ndefaults: {python: p}\ndata: {dataset: synthetic}\n"
    )
    nodes = read_config(options_of(["-c", "cluster.yml", "--venv", "/home/me/new"], monkeypatch)).nodes
    assert [(node.venv, node.conda, node.python) for node in nodes] == [("~/new", None, "python3")] * 2
    nodes = read_config(options_of(["-c", "cluster.yml", "--conda", "gnn"], monkeypatch)).nodes
    assert [(node.venv, node.conda, node.python) for node in nodes] == [(None, "gnn", "python3")] * 2


def test_import_overwrites_nothing_and_refuses_files_that_need_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("10.0.0.1\n10.0.0.2\n")
    words = ["import", "hosts", "--dataset", "synthetic", "-o", "cluster.yml"]
    assert run(words) == 0 and [node.host for node in load_config(Path("cluster.yml")).nodes] == [
        "10.0.0.1",
        "10.0.0.2",
    ]
    assert run(words) == 2 and "cluster.yml exists already" in capsys.readouterr().err
    assert run([*words, "--force"]) == 0
    assert run(["import", "cluster.yml"]) == 2 and "a cluster.yml needs no import" in capsys.readouterr().err
    assert run(["import", "none.txt"]) == 2 and "none.txt: no such file" in capsys.readouterr().err
    with pytest.raises(FleetError, match=r"cannot be read|expected keys"):
        load_config(Path("."))


def made_parts(folder: Path, *files: str, labelled: bool = False) -> Path:
    """Create a partition folder of placeholder ``files``.

    labelled: also create labels and train seeds beside it.
    """
    stem = folder.name.removesuffix("-partitions")
    beside = (f"../{stem}-label/label.pt", f"../{stem}-train-partitions/partition0.pt") if labelled else ()
    for name in (*files, *beside):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"graph_name": "g", "num_parts": 2, "node_map": {}, "edge_map": {}}')
    return folder


PYG_WORDS = "--ip_config ip_config.yaml --num_nodes 2 --dataset ogbn-products 'python e2e_homo.py'"
GLT_YAML = "nodes: [a, b]\nports: [22, 22]\nusernames: [u, v]\ndataset: "


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (f"{PYG_WORDS} --dataset_root_dir data/2-parts", "data/2-parts/ogbn-products-partitions"),
        (f"{PYG_WORDS} --workspace data --part_config lone/META.json", None),  # has no labels
        (f"{PYG_WORDS} --dataset_root_dir data/absent", None),
        ("--ip_config ip_config.txt --workspace data --part_config dgl/graph.json", "data/dgl"),
        ("--nodes a,b --dataset data/lone", "data/lone"),
        ("--config glt/examples/distributed/config.yml", "glt/data/products/products-partitions"),
        ("--config glt/examples/distributed/named.yml", "data/lone"),
        (
            "--config glt/examples/distributed/config.yml --dataset_root_dir data/2-parts",
            "data/2-parts/ogbn-products-partitions",
        ),
    ],
)
def test_parts_that_another_launcher_names_are_converted(
    words: str, parts: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Parts without labels are used only if they are the graph that the user named.
    monkeypatch.chdir(tmp_path)
    Path("ip_config.yaml").write_text("- 10.0.0.1 1\n- 10.0.0.2 1\n")
    Path("ip_config.txt").write_text("10.0.0.1 30050\n10.0.0.2 30050\n")
    made_parts(Path("data/2-parts/ogbn-products-partitions"), "META.json", labelled=True)
    made_parts(Path("data/lone"), "META.json")
    made_parts(Path("data/dgl"), "graph.json", "part0/graph.dgl")
    made_parts(Path("glt/data/products/products-partitions"), "META", "node_pb.pt", labelled=True)
    Path("glt/examples/distributed").mkdir(parents=True)
    Path("glt/examples/distributed/config.yml").write_text(GLT_YAML + "products\n")
    Path("glt/examples/distributed/named.yml").write_text(GLT_YAML + "../../../data/lone\n")
    config = read_config(options_of(shlex.split(words), monkeypatch))
    said = capsys.readouterr().err
    if parts is None:
        assert (config.data.dataset, config.data.partition.method) == ("ogbn-products", "auto")
        assert "the graph is partitioned" in said
        return
    assert (config.data.dataset, config.data.partition.method) == ("partition", "keep")
    assert Path(config.data.source or "").resolve() == (tmp_path / parts).resolve()
    assert (
        config.data.folder == str(tmp_path / "parts" / Path(parts).name.removesuffix("-partitions")) or "glt" in words
    )
    assert "are converted and kept" in said or "part_config" not in words and "root_dir" not in words
