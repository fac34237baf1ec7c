"""Tests of containers (``wrap``): words before commands, plans, preflight, exported scripts, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import findings_kit
from findings_kit import found, versions
from launcher.config.loader import load_config
from launcher.config.resolve import resolve_run
from launcher.config.schema import DataConfig, NodeConfig, RunConfig
from launcher.errors import ConfigError, UsageError
from launcher.export.kubernetes import Cluster, export_kubernetes
from launcher.export.placed_plan import ExportRequest
from launcher.export.scripts import export_script
from launcher.plan.wrap import wrapped
from launcher.setup.setup import SetupOptions, set_up
from plan_kit import cluster, facts_of, plan_of

HOST_OPTIONS = "--rm --interactive --pid=host --network=host --ipc=host --uts=host"
VOLUMES = "--volume=/tmp:/tmp --volume=/w:/w --volume=/parts:/parts"


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        ("apptainer exec | --nv image.sif", "--bind=/w:/w --bind=/parts:/parts"),
        ("/opt/bin/singularity -q exec | image.sif", "--bind=/w:/w --bind=/parts:/parts"),
        ("ch-run | -c / /images/gnn --", "--bind=/w:/w --bind=/parts:/parts"),
        ("nice podman run | img", f"{HOST_OPTIONS} {VOLUMES} --env=A --env=B"),
        (
            "docker run | --gpus all img",
            f"{HOST_OPTIONS} --user=7:8 {VOLUMES} --env=A --env=B",
        ),
        ("enroot start | img", "--mount=/tmp:/tmp --mount=/w:/w --mount=/parts:/parts --env=A --env=B"),
        ("conda run | --name gnn", "--no-capture-output"),
        ("numactl --interleave=all |", ""),
        ("podman exec run-of-mine |", ""),
        ("env conda |", ""),
        ("|", ""),
    ],
)  # fmt: skip
def test_known_programs_get_what_shows_the_run_to_the_container(wrap: str, options: str) -> None:
    before, after = (part.split() for part in wrap.split("|"))
    words = (*before, *after)
    made = wrapped(words, ["/w", "/w/data/x", "/parts", ""], {"B": "", "A": ""}, "7:8")
    assert made == (*before, *options.split(), *after)
    assert "--user={ids}" not in " ".join(wrapped(words))


def test_the_supervisor_and_fetches_run_inside_and_other_programs_outside() -> None:
    wrap = ("apptainer", "exec", "~/gnn.sif")
    node = NodeConfig("a", wrap=wrap, venv="/opt/venv", env={"GNNFLEET_KERNELS": "~/kernels"}, workdir="~/w")
    data = DataConfig("synthetic", folder="/parts", mode="verify")
    config = cluster(node, NodeConfig("b"), data=data, run=RunConfig(prometheus="/var/lib/node"))
    inside, plain = plan_of(config, facts=facts_of(2)).nodes
    binds = [
        f"--bind={folder}:{folder}" for folder in ("/home/user0/w", "/parts", "/var/lib/node", "/home/user0/kernels")
    ]
    assert inside.wrap == (*wrap[:2], *binds, wrap[2]) and plain.wrap == ()
    assert inside.start.argv[0] == "/opt/venv/bin/python" and plain.start.argv[0] == "/home/user1/venv/bin/python"
    assert inside.server.argv[0] == inside.trainer.argv[0] == "/opt/venv/bin/python"  # started by the supervisor
    assert inside.python.argv == ("/home/user0/venv/bin/python",)  # that of the probe
    assert inside.program("control", "stop").argv[:2] == ("/home/user0/venv/bin/python", "-S")
    assert inside.program("store/fetch_parts").argv[:-1] == (*inside.wrap, "/opt/venv/bin/python")
    start = inside.file("start.sh").content.splitlines()[-1]
    assert (
        start.startswith("exec apptainer exec --bind=/home/user0/w") and " ~/gnn.sif /opt/venv/bin/python -S " in start
    )
    assert plan_of(cluster(NodeConfig("a", wrap=wrap))).nodes[0].python.argv[0] == "bash"  # any Python of the host


def test_compiled_kernels_of_a_container_stay_on_the_host() -> None:
    node = plan_of(cluster(NodeConfig("a", wrap=("podman", "run", "x"))), facts=facts_of(1)).nodes[0]
    assert node.start.env["GNNFLEET_KERNELS"] == f"{node.workdir}/kernels" and "--env=GNNFLEET_KERNELS" in node.wrap


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("wrap: [conda, run, -n, a], conda: a", "wrap and conda are both given"),
        ("wrap: [ch-run, ''], venv: /v", "is empty"),
        ("wrap: [ch-run, x], workdir: '/a:b'", "a colon or comma in its name"),
        ("wrap: apptainer exec image.sif", r"write a list of words: \[apptainer, exec, image.sif\]"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    (tmp_path / "cluster.yml").write_text(f"nodes: [{{host: a, {keys}}}]\ndata: {{dataset: synthetic}}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "cluster.yml")


def seen(**changes: Any) -> dict[str, Any]:
    """Return a reply of ``surroundings.py``."""
    same = {"pid": "pid:[1]", "net": "net:[2]"}
    usual = {"python": "/inner/python3", "namespaces": same, "folders": {"/w": "1:2", "/tmp": "1:3"}, "variable": "1"}
    return {**usual, **changes}


def test_a_container_apart_from_its_host_blocks_the_run() -> None:
    config = findings_kit.cluster(1, nodes=(NodeConfig("host0", user="ann", wrap=("podman", "run", "img")),))
    assert found(1, {0: {"inside": seen(), "outside": seen()}}, config=config) == []
    apart = seen(namespaces={"pid": "pid:[9]", "net": "net:[9]"}, folders={"/w": "", "/tmp": "5:5"}, variable="")
    findings = found(1, {0: {"inside": apart, "outside": seen()}}, config=config)
    assert [(one.severity, one.check) for one in findings] == [("block", "container")] * 4
    assert "--pid=host" in findings[0].remedy and "--network=host" in findings[1].remedy
    assert "does not show /w, /tmp of the host" in findings[2].message and "variables" in findings[3].message
    not_yet = seen(folders={"/w": "", "/tmp": "1:3"})  # also missing on the host
    assert found(1, {0: {"inside": not_yet, "outside": not_yet}}, config=config) == []


def test_packages_are_those_of_the_image() -> None:
    config = findings_kit.cluster(
        1, nodes=(NodeConfig("host0", user="ann", wrap=("podman", "run", "img"), setup=("x",)),)
    )
    both = {"inside": seen(), "outside": seen()}
    (missing,) = found(1, {0: {**both, **versions(numba="")}}, config=config)
    assert missing.message == "numba not installed for /inner/python3 in the container" and not missing.command
    assert missing.remedy.startswith("add to the container's image: `/inner/python3 -m pip install numba")
    (old,) = found(1, {0: {**both, **versions(python="3.9.1")}}, config=config)
    assert "too old (/inner/python3 in the container)" in old.message and "take an image" in old.remedy


CONTAINED = """
nodes: [gnn1, gnn2]
defaults: {wrap: [podman, run, "my image"], env: {NCCL_DEBUG: INFO}}
data: {dataset: synthetic, folder: /scratch/parts}
"""


def requested(folder: Path, own: tuple[str, ...] = ()) -> ExportRequest:
    (folder / "cluster.yml").write_text(CONTAINED)
    return ExportRequest(resolve_run(load_config(folder / "cluster.yml")), "run1", own, folder)


@pytest.mark.parametrize("kind", ["bash", "torchrun", "slurm"])
def test_scripts_start_processes_in_the_container(tmp_path: Path, kind: str) -> None:
    (tmp_path / "go.sh").touch()

    def words(own: tuple[str, ...], name: str) -> list[str]:
        text = export_script(kind, requested(tmp_path, own), {}, tmp_path / "run.sh").text
        (tmp_path / "run.sh").write_text(text)
        subprocess.run(["bash", "-n", "run.sh"], cwd=tmp_path, check=True)
        line = next(line for line in text.splitlines() if line.startswith(f"{name}="))
        shell = f'HERE=/h RUN=/r PARTS=/p WRAP=(W); {line}; printf "%s\\n" "${{{name}[@]}}"'
        return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()

    wrap = words((), "WRAP")
    assert wrap[:2] == ["podman", "run"] and {"--volume=/h:/h", "--volume=/p:/p", "--env=RANK"} < {*wrap}
    assert ("--volume=/r:/r" in wrap) == (kind != "slurm") and "--env=NCCL_DEBUG" in wrap
    assert wrap[-5:] == ["my image", "sh", "-c", 'cd "$0" && exec "$@"', "/h" if kind == "slurm" else "/r"]
    assert words(("bash", "go.sh"), "WRAP")[-1] == "/h" and words((), "PYTHON") == ["W", "python3"]
    text = export_script(kind, requested(tmp_path, ("bash", "go.sh")), {}, tmp_path / "run.sh").text
    assert '"${WRAP[@]}" bash go.sh' in text if kind != "torchrun" else "--no-python bash go.sh" in text


def test_pods_and_setup_refuse_containers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nodes\.0\.wrap: pods are containers already"):
        export_kubernetes(requested(tmp_path), Cluster("registry.lab/gnnfleet:1"))
    with pytest.raises(UsageError, match=r"nodes\.0\.wrap: gnnfleet setup installs .* not into the image"):
        set_up(requested(tmp_path).config, SetupOptions(Console(), ""))
