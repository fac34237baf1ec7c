"""Tests of ``gnnfleet export``: golden files, schemas of Kubernetes, messages, scripts that run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden_kit import GOLDEN, check_text
from launcher.cli.main import run
from launcher.config.loader import load_config
from launcher.config.resolve import resolve_run
from launcher.errors import UsageError
from launcher.export.kubernetes import Exported, export_kubernetes, resource_name
from launcher.export.placed_plan import ExportRequest
from launcher.export.pods import Cluster
from launcher.export.scripts import export_script
from launcher.files import CODE_ROOT
from launcher.plan.sbatch import option_lines, parse_options
from waiting import DEADLINE, wait_until

TWO = """
name: products
nodes:
  - {host: gnn1, devices: [0, 1], venv: /opt/gnn}
  - {host: gnn2, devices: [0, 1], venv: /opt/gnn, env: {NCCL_DEBUG: INFO}}
data: {dataset: ogbn-products, folder: /scratch/parts}
train: {epochs: 3}
run: {restarts: 2}
"""
ROLES = """
name: shop
nodes:
  - {host: mem1, role: server}
  - {host: mem2, role: server}
  - {host: gpu1, role: client, devices: [3]}
  - {host: gpu2, role: client, devices: [0]}
data: {dataset: "tables", source: /shop, mode: verify, folder: /data/parts}
"""
STORE = """
name: stored
nodes:
  - {host: gnn1, role: server, env: {AWS_SECRET_ACCESS_KEY: hush, AWS_DEFAULT_REGION: north}}
  - {host: gnn2, role: server}
  - {host: gnn3, role: client, devices: [0]}
data:
  dataset: ogbn-products
  num_parts: 4
  topology: replicated
  store: s3://bucket/products
  store_options: {endpoint_url: "http://minio:9000", use_ssl: false, addressing: "8"}
"""
TOY = """
transport: local
nodes: 2
data: {dataset: synthetic, options: {num_nodes: 2000, avg_degree: 8, num_features: 8, num_classes: 4}, folder: parts}
train: {hidden: 16, fanouts: [4, 4], batch_size: 256, epochs: 2}
"""


def request(text: str, folder: Path, own: tuple[str, ...] = ()) -> ExportRequest:
    (folder / "cluster.yml").write_text(text)
    return ExportRequest(resolve_run(load_config(folder / "cluster.yml")), "Products_1", own, folder)


def kubernetes(text: str, folder: Path, **more: Any) -> Exported:
    own = more.pop("own", ())
    return export_kubernetes(request(text, folder, own), Cluster("registry.lab/gnnfleet:1", **more))


# Kubernetes


def manifests_of(tmp_path: Path) -> dict[str, Exported]:
    claims = (("datasets", "/data"),)
    return {
        "jobset": kubernetes(TWO, tmp_path),
        "job": kubernetes(TWO, tmp_path, kind="job", namespace="gnn"),
        "roles": kubernetes(ROLES, tmp_path, claims=claims),
        "roles as jobs": kubernetes(ROLES, tmp_path, claims=claims, kind="job"),
        "store": kubernetes(STORE, tmp_path, store_secret="s3"),
        "store with a claim": kubernetes(STORE, tmp_path, claims=(("fast", "/parts"),), kind="job"),
    }


def without_plan(text: str) -> str:
    """Return manifests in which each file of a ConfigMap is replaced by ``True``, or ``False`` if it is empty."""
    documents = list(yaml.safe_load_all(text))
    for each in documents:
        if each["kind"] == "ConfigMap":
            each["data"] = {key: f"{len(value) > 0}" for key, value in each["data"].items()}
    return yaml.safe_dump_all(documents, sort_keys=False)


@pytest.mark.parametrize("name", ["jobset", "job"])
def test_golden_manifests(name: str, tmp_path: Path) -> None:
    check_text(GOLDEN / f"export_{name}.yml", without_plan(manifests_of(tmp_path)[name].text()))


@pytest.mark.slow
def test_manifests_fit_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """Every field exists, with the right type, in the OpenAPI schemas of Kubernetes and JobSet."""
    schemas = pytest.importorskip("kubernetes_validate")
    jobset = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set").JobsetV1alpha2JobSet
    seen = set()
    for made in manifests_of(tmp_path).values():
        for each in yaml.safe_load_all(made.text() + made.secret_text()):
            seen.add(each["kind"])
            if each["kind"] != "JobSet":
                schemas.validate(each, "1.31", strict=True)
                continue
            assert jobset.from_dict(each).to_dict() == each  # from_dict drops unknown fields
            for job in each["spec"]["replicatedJobs"]:
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
                schemas.validate(whole, "1.31", strict=True)
    assert seen == {"JobSet", "Job", "Service", "ConfigMap", "PersistentVolumeClaim", "Secret"}


def test_nodes_know_each_other_by_the_names_of_their_pods(tmp_path: Path) -> None:
    documents = {each["kind"]: each for each in manifests_of(tmp_path)["roles"].manifests}
    data = documents["ConfigMap"]["data"]
    hosts = [node["host"] for node in json.loads(data["cluster.json"])["nodes"]]
    assert hosts == [
        f"products-1-{pod}.products-1" for pod in ("servers-0-0", "servers-0-1", "clients-0-0", "clients-0-1")
    ]
    spec = json.loads(data["node3.json"])["spec"]
    assert spec["trainer"]["env"]["MASTER_ADDR"] == hosts[2]
    assert spec["trainer"]["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    hub = spec["nodes"][spec["hub"]]
    assert (spec["hub"], hub["address"], hub["bind"], hub["control_port"]) == (2, hosts[2], "0.0.0.0", 29400)
    servers, clients = documents["JobSet"]["spec"]["replicatedJobs"]
    first = [
        job["template"]["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"] for job in (servers, clients)
    ]
    assert (first, documents["JobSet"]["spec"]["network"]["subdomain"]) == (["0", "2"], "products-1")


def test_secrets_are_in_the_secret_only(tmp_path: Path) -> None:
    made = kubernetes(TWO, tmp_path)
    data = made.secret["stringData"]
    assert set(data) == {"token", "service.key"}
    assert not [value for value in (data["token"], *json.loads(data["service.key"]).values()) if value in made.text()]


def pods_of(made: Exported) -> dict[str, Any]:
    (jobset,) = [each for each in made.manifests if each["kind"] == "JobSet"]
    jobs = jobset["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"] for job in jobs}


def test_an_init_container_fetches_parts_from_the_store(tmp_path: Path) -> None:
    made = kubernetes(STORE, tmp_path, store_secret="s3")
    jobs = pods_of(made)
    assert list(jobs) == ["servers", "clients"]  # and none that makes the parts
    for job in jobs.values():
        pod = job["template"]["spec"]
        (fetch,), (node,) = pod["initContainers"], pod["containers"]
        assert fetch["envFrom"] == [{"secretRef": {"name": "s3"}}] and "envFrom" not in node
        mounts = [[mount["mountPath"] for mount in each["volumeMounts"]] for each in (fetch, node)]
        assert mounts[0] == ["/etc/gnnfleet/run", "/gnnfleet", "/parts"] and {*mounts[0]} < {*mounts[1]}
        assert {"name": "parts", "emptyDir": {}} in pod["volumes"]
        failing = [rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"][:2]]
        assert failing == ["fetch", "node"]
    (config,) = [each for each in made.manifests if each["kind"] == "ConfigMap"]
    nodes = [json.loads(config["data"][f"node{k}.json"]) for k in range(3)]
    fetch, folder = nodes[1]["fetch"], nodes[1]["fetch"]["folder"]
    assert (fetch["url"], fetch["parts"], fetch["replicated"]) == ("s3://bucket/products", [2, 3], True)
    assert folder.startswith("/parts/ogbn-products-") and folder in nodes[1]["spec"]["server"]["argv"]
    assert nodes[2]["fetch"] is None and nodes[0]["env"]["AWS_DEFAULT_REGION"] == "north"
    assert "hush" not in made.text() + made.secret_text()
    assert "credentials are left out (AWS_SECRET_ACCESS_KEY)" in made.notes[0]
    claimed = yaml.safe_load_all(kubernetes(STORE, tmp_path, claims=(("fast", "/parts"),), kind="job").text())
    volumes = next(each for each in claimed if each["kind"] == "Job")["spec"]["template"]["spec"]["volumes"]
    claims = [volume["persistentVolumeClaim"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert [claim["claimName"] for claim in claims] == ["products-1", "fast"]
    assert not [volume for volume in volumes if volume["name"] == "parts"]


def test_addresses_of_notify_are_left_out(tmp_path: Path) -> None:
    told = STORE + 'run: {notify: ["https://hooks.lab/T0K3N", $HOOK, ./tell.sh]}\n'
    made = kubernetes(told, tmp_path)
    assert "T0K3N" not in made.text() + made.secret_text() and "$HOOK" in made.text()
    assert any("run.notify" in note for note in made.notes)


def test_own_files_travel_in_the_config_map(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hi')\n")
    (tmp_path / "more.bin").write_bytes(b"\xff\x00")
    made = kubernetes(TWO, tmp_path, own=("python", "train.py", "more.bin"))
    (config,) = [each for each in made.manifests if each["kind"] == "ConfigMap"]
    export = json.loads(config["data"]["export.json"])
    assert [(item["path"], item["mode"]) for item in export["files"]] == [("more.bin", 0o644), ("train.py", 0o644)]
    assert (config["data"]["file1"], config["binaryData"]["file0"]) == ("print('hi')\n", "/wA=")
    (tmp_path / "train.py").write_text("#" * (1 << 20))
    with pytest.raises(UsageError, match="a ConfigMap of Kubernetes holds 1,048,576"):
        kubernetes(TWO, tmp_path, own=("python", "train.py"))


def test_names_of_resources() -> None:
    names = {"Products_1": "products-1", "20 things": "run-20-things", "-": "run", "a" * 50: "a" * 31 + "-160b4e43"}
    assert {text: resource_name(text) for text in names} == names
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 40 for name in names.values())


def test_pods_ask_for_what_the_config_says_or_the_parts_take(tmp_path: Path) -> None:
    text = ROLES.replace("role: server", "role: server, cpus: 8, memory: 64GB", 1).replace("name: shop", "name: shop\n")
    made = kubernetes(text, tmp_path, claims=(("datasets", "/data"),))
    found = [job["template"]["spec"]["containers"][0]["resources"] for job in pods_of(made).values()]
    assert found == [
        {"requests": {"cpu": 8, "memory": "61036Mi"}, "limits": {"memory": "61036Mi"}},
        {"requests": {"cpu": 2}},
        {"requests": {"cpu": 2}, "limits": {"nvidia.com/gpu": 1}},
    ]
    assert any("give `memory` of the nodes in cluster.yml" in note for note in made.notes)


#: A kubectl whose only pod is a folder of this machine, $POD.
KUBECTL = """#!/usr/bin/env bash
[[ "$1 $2" == "-n gnn" ]] || exit 9
case "$3" in
  get) [[ "$*" == *"-l gnnfleet/run="*"-o name"* ]] && echo "pod/toy-workers-0-0" ;;
  exec)
    shift 3
    [[ $1 == -i ]] && shift || exec </dev/null
    [[ "$1 $2" == "pod/toy-workers-0-0 --" ]] || exit 9
    shift 2
    exec "${@//\\/gnnfleet\\//$POD/gnnfleet/}" ;;
esac
"""


def test_a_graph_in_files_of_this_machine_comes_into_the_pods_by_a_command_in_the_note(tmp_path: Path) -> None:
    text = TWO.replace("dataset: ogbn-products", "dataset: file, source: graph.pt")
    parts = tmp_path / "my parts"
    text = text.replace("folder: /scratch/parts", f"folder: '{parts}'")
    (note,) = [note for note in kubernetes(text, tmp_path, namespace="gnn").notes if "files of this machine" in note]
    assert "`data.store`" in note and "--claim NAME=/data with `data.mode: verify`" in note
    command = re.search(r"with bash: (\(.*\))(;|$)", note)
    assert command
    (parts / "part0").mkdir(parents=True)
    (parts / "manifest.json").write_text("{}")
    (parts / "part0" / "x.npy").write_bytes(b"x" * 100_000)
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "POD": str(tmp_path / "pod")}
    (tmp_path / "pod/gnnfleet/parts").mkdir(parents=True)

    def copy() -> int:
        return subprocess.run(["bash", "-c", command[1]], env=env, stderr=subprocess.DEVNULL, check=False).returncode

    broken = parts / "part0" / "gone.npy"  # tar fails, and a part of the files arrives
    broken.symlink_to("/nowhere")
    with_missing = command[1].replace("-cf - .", "-hcf - .")
    assert subprocess.run(["bash", "-c", with_missing], env=env, stderr=subprocess.DEVNULL, check=False).returncode
    broken.unlink()
    assert [path.suffix for path in (tmp_path / "pod/gnnfleet/parts").iterdir()] == [".new"], "not complete"
    assert copy() == 0
    (copied,) = (tmp_path / "pod/gnnfleet/parts").iterdir()
    assert copied.name.startswith("file-") and not copied.name.endswith(".new")
    names = {path.relative_to(copied).as_posix() for path in copied.rglob("*")}
    assert names == {"manifest.json", "part0", "part0/x.npy"}
    assert (copied / "part0" / "x.npy").read_bytes() == b"x" * 100_000
    assert copy() != 0 and (copied / "manifest.json").is_file(), "parts that are there are not replaced"


# Scripts


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (TOY, {}, {"exclusive": "", "mem": "0"}),
        (TOY, {"mem": "9G", "cpus-per-task": "3"}, {"cpus-per-task": "3", "mem": "9G"}),
        (TOY + "defaults: {cpus: 5, memory: 10GB}\n", {}, {"cpus-per-task": "5", "mem": "9537M"}),
        (TWO, {}, {"cpus-per-task": "6"}),
    ],
)
def test_a_job_asks_for_processors_and_memory(
    config: str, options: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    script = export_script("slurm", request(config, tmp_path), options, tmp_path / "run.sh").text
    lines = re.findall(r"(?m)^#SBATCH --(exclusive|cpus-per-task|mem)=?(.*)$", script)
    assert dict(lines) == expected


def test_two_exported_runs_on_one_host_have_different_ports(tmp_path: Path) -> None:
    found = set()
    for run_id in ("first", "second"):
        made = export_script("bash", replace(request(TOY, tmp_path), run_id=run_id), {}, None).text
        found |= {int(number) + k for number in re.findall(r"FIRST_PORT:-(\d+)", made) for k in range(3)}
    assert len(found) == 6 and min(found) >= 20000 and max(found) < 32768
    fixed = TOY + "run: {service_port: 7001, master_port: 7000}\n"
    assert "MASTER_PORT=7000 SERVICE_PORT=7001" in export_script("bash", request(fixed, tmp_path), {}, None).text


def test_a_file_of_the_user_is_not_taken_for_one_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "cluster.json").write_text("mine")
    text = TOY + "run: {files: [cluster.json]}\n"
    made = export_script("bash", request(text, tmp_path, ("python", "train.py")), {}, None).text
    assert '"endpoint"' in made and "mine" not in made


@pytest.mark.parametrize("kind", ["bash", "torchrun", "slurm"])
def test_a_model_class_is_read_beside_the_script(kind: str, tmp_path: Path) -> None:
    (tmp_path / "models.py").touch()
    made = export_script(kind, request(TOY.replace("{hidden", '{model: "models.py:MyGNN", hidden'), tmp_path), {}, None)
    assert '--model "$HERE/models.py:MyGNN"' in made.text
    assert any("every node needs them beside this file" in note for note in made.notes)


def run_node(config: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script of node 0 of two nodes; what it does before its graph server starts."""
    (folder / "run.sh").write_text(export_script("bash", request(config, folder), {}, folder / "run.sh").text)
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(CODE_ROOT), **env}
    return subprocess.run(["bash", "run.sh", "0"], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_a_script_says_why_it_cannot_run_on_its_host(tmp_path: Path) -> None:
    hosts = (
        "nodes: [{host: localhost}, {host: no-such-alias}]\ndata: {dataset: synthetic, mode: verify, folder: /none}\n"
    )
    done = run_node(hosts + "run: {encrypt: 'off'}\n", tmp_path)
    assert done.returncode == 1 and "knows no address of no-such-alias" in done.stderr and "`address`" in done.stderr
    there = hosts.replace("no-such-alias}", "no-such-alias, address: 127.0.0.2}")
    assert "there is no manifest.json" in run_node(there + "run: {encrypt: 'off'}\n", tmp_path).stderr
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = run_node(there + "run: {encrypt: 'off'}\n", tmp_path, FIRST_PORT=str(port))
        assert done.returncode == 1 and f"port {port} is in use here" in done.stderr
    python = there.replace("host: localhost", f"host: localhost, python: {tmp_path}/python")
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} -I -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    done = run_node(python + "run: {encrypt: 'off'}\n", tmp_path)
    assert done.returncode == 1 and "No module named 'gnnfleet'" in done.stderr
    assert "gnnfleet setup --with gnnfleet" in done.stderr


@pytest.mark.parametrize("kind", ["bash", "torchrun", "slurm"])
def test_golden_scripts(kind: str, tmp_path: Path) -> None:
    output = Path("/jobs/products.sh")
    script = export_script(kind, request(TWO, tmp_path), {"partition": "gpu", "exclusive": ""}, output)
    assert json.loads(script.key).keys() == {"public", "secret"}
    check_text(GOLDEN / f"export_{kind}.sh", script.text)
    subprocess.run(["bash", "-n"], input=script.text, text=True, check=True)


def test_options_of_sbatch() -> None:
    given = parse_options("nodelist=gpu[01,03-04],requeue,comment=two words,exclusive=true,overcommit=no")
    lines = ["nodelist=gpu[01,03-04]", "requeue", 'comment="two words"', "exclusive"]
    assert option_lines(given) == [f"#SBATCH --{line}" for line in lines]


def test_the_section_slurm_gives_options_and_devices(tmp_path: Path) -> None:
    section = "{partition: gpu, nodes: 2, gpus_per_node: 'a100:2', time: '2:00:00'}"
    text = f"transport: slurm\nslurm: {section}\ndata: {{dataset: synthetic}}\n"
    script = export_script("slurm", request(text, tmp_path), {"time": "30"}, Path("run.sbatch")).text
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        *("job-name=run", "nodes=2", "ntasks-per-node=1", "gpus-per-node=a100:2", "cpus-per-task=6"),
        *("output=%x-%j.log", "open-mode=append", "signal=B:USR1@120", "partition=gpu", "time=30"),
    ]
    assert "4 processes on 2 nodes" in script and "end=$((SECONDS + 60))" in script
    own = {"signal": "B:USR1@300", "requeue": "no"}
    script = export_script("slurm", request(text, tmp_path), own, Path("run.sbatch")).text
    assert "#SBATCH --signal=B:USR1@300" in script and "SECONDS + 150" in script and "scontrol requeue" not in script


#: Stand-ins for Slurm's commands in a job with one node. A job that is requeued ends, as it does under Slurm.
SLURM = {
    "srun": 'while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=0 SLURM_PROCID=0 exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then echo localhost; else echo "$@" >requeued; kill "$(<trainer.pid)"; fi',
}
#: Saves a checkpoint when it is asked to, as rank 0 does; ends when it finds the file `done`.
TRAINER = """
import os, pathlib, sys, time
run = pathlib.Path(os.environ["GNNFLEET_RUN_DIR"])
pathlib.Path("trainer.pid").write_text(str(os.getpid()))
while not pathlib.Path("done").exists():
    if (run / "control/checkpoint").exists():
        (run / "checkpoints").mkdir(exist_ok=True)
        (run / "checkpoints/last.pt").touch()
        (run / "control/checkpoint").unlink()
    time.sleep(0.02)
sys.exit(7)
"""


@pytest.mark.parametrize("requeue", [True, False])
def test_a_warned_job_saves_a_checkpoint_and_is_requeued_if_it_may_be(requeue: bool, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/manifest.json").touch()
    (tmp_path / "train.py").write_text(TRAINER)
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    host = f"{{host: gpu1, python: {sys.executable}}}"
    text = f"nodes: [{host}]\ndata: {{dataset: synthetic, mode: verify, folder: {tmp_path}/parts}}\n"
    job = request(text, tmp_path, ("python", "train.py"))
    script = export_script("slurm", job, {"requeue": ""} if requeue else {}, tmp_path / "job.sh").text
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(CODE_ROOT)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "toy", "SLURM_JOB_NODELIST": "gpu1", "SLURM_NNODES": "1"}
    (tmp_path / "job.sh").write_text(script)
    started = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "trainer.pid").exists())
    started.send_signal(signal.SIGUSR1)
    saved = tmp_path / "runs/Products_1-7/node0/checkpoints/last.pt"
    wait_until(saved.exists)
    if not requeue:  # the training goes on, and ends with its own status
        (tmp_path / "done").touch()
    _, errors = started.communicate(timeout=DEADLINE)
    assert started.returncode == (128 + signal.SIGTERM if requeue else 7), errors
    assert (tmp_path / "requeued").exists() == requeue and "toy: Slurm ends the job soon: saving" in errors


@pytest.mark.parametrize("kind", ["bash", "torchrun"])
def test_scripts_of_several_roles(kind: str, tmp_path: Path) -> None:
    text = export_script(kind, request(ROLES, tmp_path), {}, Path("run.sh")).text
    assert "OWN=(0 1 '' '')  # parts" in text
    assert "PROCS=(0 0 1 1)  # processes" in text
    assert 'export MASTER_ADDR="${HOSTS[2]}" MASTER_PORT' in text
    assert "if [[ -z ${OWN[NODE]} ]]; then unset GNNFLEET_PARTS; fi" in text
    assert "if [[ ${PROCS[NODE]} == 0 ]]; then wait; fi" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("kind", ["bash", "torchrun", "slurm"])
def test_scripts_fetch_parts_from_the_store(kind: str, tmp_path: Path) -> None:
    text = STORE.replace("role: server", "role: worker").replace("role: client, devices: [0]", "role: worker")
    script = export_script(kind, request(text, tmp_path), {}, Path("run.sh"))
    (line,) = [line for line in script.text.splitlines() if "partition fetch" in line]
    assert 's3://bucket/products "$PARTS" --part ${OWN[NODE]//,/ --part } \\' in line
    assert "--replicated --store-option endpoint_url=http://minio:9000" in script.text
    assert "--store-option 'addressing=\"8\"'" in script.text
    assert "PARTS=~/gnnfleet-work/data/ogbn-products-" in script.text and "partition make" not in script.text
    assert "hush" not in script.text and "AWS_DEFAULT_REGION=north" in script.text
    assert any("set them in the environment of the script" in note for note in script.notes)
    subprocess.run(["bash", "-n"], input=script.text, text=True, check=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TOY, "run.sh: node 1 has no parts in {folder}/parts: there is no manifest.json; make the parts there"),
        (TOY.replace("data: {", "data: {mode: verify, "), "there is no manifest.json; copy the parts there, or change"),
        (TOY.replace("data: {", "data: {store: 'file://{folder}/none', "), "/none has no manifest.json"),
    ],
)
def test_a_script_without_parts_says_so(config: str, message: str, tmp_path: Path) -> None:
    config = config.replace("{folder}", str(tmp_path)).replace("folder: parts", f"folder: {tmp_path}/parts")
    (tmp_path / "run.sh").write_text(export_script("bash", request(config, tmp_path), {}, tmp_path / "run.sh").text)
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(CODE_ROOT)}
    done = subprocess.run(
        ["bash", "run.sh", "1"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode in (1, 2) and message.format(folder=tmp_path) in done.stderr, done.stderr


def test_words_of_an_own_command_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    own = ("python", "train.py", "--name", "a $b `c` 'd'")
    text = export_script("bash", request(TOY, tmp_path, own), {}, None).text
    (line,) = [line for line in text.splitlines() if "train.py" in line and "LOCAL_RANK" in line]
    printed = line.split("LOCAL_RANK=$i ")[1].removesuffix(" &")
    done = subprocess.run(
        ["bash", "-c", f"PYTHON=python; printf '%s|' {printed}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "python|train.py|--name|a $b `c` 'd'|"


# The command


MESSAGES = {
    "--to kubernetes": "--to kubernetes needs --image",
    "--to bash": "the script needs a key file for the encrypted graph service: give -o FILE",
    "--to bash --image a": "--image is for --to kubernetes, not for --to bash",
    "--to torchrun --slurm time=1": "--slurm is for --to slurm, not for --to torchrun",
    "--to slurm --slurm=-p,gpu": "--slurm -p: give long options of sbatch without --",
    "--to slurm -o x --store-secret s3": "--store-secret is for --to kubernetes, not for --to slurm",
    "--to kubernetes --image a --store-secret s3": "--store-secret is for a config with data.store",
    "--to slurm -o x --slurm nodes=4": "--slurm nodes=4: the script needs 2, as cluster.yml gives",
    "--to kubernetes --image a --claim data": "--claim data: give NAME=PATH",
    "--to kubernetes --image a --set data.mode=verify": "data.folder: /scratch/parts is on no volume of the pods",
    "--to kubernetes --image a --set data.store=file:///big/parts": "data.store: /big/parts is on no volume",
    "--to bash --set data.serving=other": "cannot attach to serving cluster other",
    "--to bash --set train.resume=old.pt": "an exported run (bash) gets no checkpoint of this machine",
    "--to slurm -o x --set nodes.0.devices=[0]": "all nodes must be workers with equal procs and devices",
}


@pytest.mark.parametrize("words", MESSAGES)
def test_messages(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yml").write_text(TWO)
    assert run(["export", "-c", "cluster.yml", *words.split()]) == 2
    captured = capsys.readouterr()
    assert MESSAGES[words] in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yml"]


def test_files_and_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yml").write_text(TWO)
    words = ["export", "-c", "cluster.yml", "--to", "kubernetes", "--image", "a"]
    assert run([*words, "-o", "run.yml"]) == 0
    assert (tmp_path / "run.secret.yml").stat().st_mode & 0o777 == 0o600
    assert "wrote run.yml, run.secret.yml" in capsys.readouterr().err
    assert run([*words, "-o", "run.yml"]) == 2
    assert "run.yml exists already; choose another name, or give --force" in capsys.readouterr().err
    assert run([*words, "-o", "run.yml", "--force"]) == 0
    capsys.readouterr()
    assert run(words) == 0
    kinds = [each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["PersistentVolumeClaim", "ConfigMap", "JobSet", "Secret"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bash", "torchrun"])
def test_exported_scripts_train_with_the_losses_of_a_launch(
    kind: str, tmp_path: Path, compiled_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("cluster.yml").write_text(TOY)
    ports = ["--set", "run.encrypt=on", "--set", "defaults.procs=2"]
    assert (
        run(["-c", "cluster.yml", "--plain", "--run-id", "launched", *ports, "--set", "defaults.workdir=w{node_rank}"])
        == 0
    )
    assert run(["export", "-c", "cluster.yml", "--to", kind, "-o", "run.sh", "--run-id", "exported", *ports]) == 0
    started = [subprocess.Popen([shutil.which("bash"), "run.sh", str(k)], env=dict(os.environ)) for k in (1, 0)]
    assert [process.wait(DEADLINE) for process in started] == [0, 0]
    metrics = {
        "launched": tmp_path / "runs/launched/metrics.jsonl",
        "exported": tmp_path / "gnnfleet-work/runs/exported/node0/metrics-rank0.jsonl",
    }
    losses = {
        name: [
            line["loss"]
            for line in map(json.loads, path.read_text().splitlines())
            if line.get("kind") == "epoch" and line.get("rank", 0) == 0
        ]
        for name, path in metrics.items()
    }
    assert len(losses["exported"]) == 2
    assert losses["exported"] == pytest.approx(losses["launched"], abs=1e-6)
