"""Tests of a whole launch on this machine: launch.py as a process, with real tmux and the bundled trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.loader import load_config
from launcher.config.resolve import resolve_run
from launcher.plan.build import offline_plan
from launching import Launched, Running, launch, local_config, make_parts
from waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def private_tmux(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMUX_TMPDIR", str(tmp_path_factory.mktemp("tmux")))
        yield


def test_two_local_nodes_have_the_same_loss_curve_as_one(local_runs: dict[str, Launched]) -> None:
    # A run with two parts and two processes has the same losses, to 1e-4 relative, as a run with one part and one
    # process, because both draw the same samples.
    one, two = local_runs["one"], local_runs["two"]
    assert one.status == 0, one.output
    assert two.status == 0, two.output
    assert len(one.step_losses()) == 4
    for epoch in (1, 2):
        assert two.step_losses(epoch) == pytest.approx(one.step_losses(epoch), rel=1e-4)
    assert two.result["state"] == "done"
    assert two.result["metrics"]["test_accuracy"] == pytest.approx(one.result["metrics"]["test_accuracy"], abs=0.02)
    assert f"{two.result['metrics']['test_accuracy']:.3f}"[:4] in two.output
    assert {path.name for path in (two.run_dir / "logs" / "node1").iterdir()} >= {"rank1.log", "supervisor.log"}
    assert (two.run_dir / "checkpoints" / "last.pt").stat().st_size > 0
    assert json.loads((two.run_dir / "run.json").read_text())["plan"]["world_size"] == 2


@pytest.mark.slow
def test_killing_a_graph_server_in_training_loses_no_batch(tmp_path: Path) -> None:
    train = {"epochs": 25, "batch_size": 64}
    config = local_config(tmp_path, [1, 1], data={"topology": "partitioned", "cache": "0"}, train=train)
    calm = launch(config, "--run-id", "calm", timeout=300)
    assert calm.status == 0, calm.output
    shutil.move(tmp_path / "runs", tmp_path / "calm" / "runs")
    running = Running(config, "--run-id", "hurt", "--plain")
    steps, state = (tmp_path / "node1/runs/hurt/node1" / name for name in ("metrics-rank1.jsonl", "state.json"))
    wait_until(lambda: steps.exists() and '"epoch": 3' in steps.read_text())
    (server,) = (one for one in json.loads(state.read_text())["processes"] if one["name"] == "server")
    os.kill(server["pid"], signal.SIGKILL)
    done = running.end()
    assert done.status == 0, done.output
    assert "server of node1 (local) was killed by signal 9 (SIGKILL); restart 1 of 3 in 0.5 s" in done.output
    before = Launched(0, "", tmp_path / "calm")
    for epoch in range(1, 26):
        assert done.step_losses(epoch) == before.step_losses(epoch)


SEES = """
import json, os, sys
seen = {"argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd()}
seen["parts"] = os.listdir(os.environ["GNNFLEET_PARTS"])
json.dump(seen, open(os.path.join(os.environ["GNNFLEET_RUN_DIR"], f"seen{os.environ['RANK']}.json"), "w"))
os.makedirs(os.environ["GNNFLEET_RUN_DIR"] + "/output/deep", exist_ok=True)
open(os.environ["GNNFLEET_RUN_DIR"] + f"/output/deep/{os.environ['RANK']}.txt", "w").write("mine")
"""


@pytest.fixture(scope="module")
def own_script_run(tmp_path_factory, local_workdirs, private_tmux):
    """Launch a user script on two nodes. Yield the recorded plan, and the plan that ``gnnfleet plan`` makes."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "sees.py").write_text(SEES)
    words = ("python", "sees.py", "--lr", "0.01", "it's")
    config = local_config(folder, [1, 2], local_workdirs)
    make_parts(config)
    done = launch(config, "--", *words)
    assert done.status == 0, done.output
    brought = {path.relative_to(done.run_dir / "output").as_posix() for path in done.run_dir.glob("output/**/*.txt")}
    assert brought == {"node0/deep/0.txt", "node1/deep/1.txt", "node1/deep/2.txt"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # relative paths of the config start here
        yield (
            json.loads((done.run_dir / "run.json").read_text())["plan"],
            offline_plan(resolve_run(load_config(config)), done.run_dir.name, words),
        )


def test_launch_sends_the_files_and_processes_of_the_plan(own_script_run):
    plan, draft = own_script_run
    for node, drafted in zip(plan["nodes"], draft.nodes, strict=True):
        code = [replace(file, dest=f"{drafted.code_dir}/{file.dest}") for file in draft.code]
        sent = [*code, *(file for file in drafted.files if file.source or file.secret)]
        assert len(sent) > 100 and [file.dest for file in sent if differs_from_plan(file)] == []
        spec = json.loads(Path(node["run_dir"], "node.json").read_text())
        for name in ("server", "trainer"):
            assert spec[name]["argv"] == node[name]["argv"]
            assert masked(spec[name]["env"]) == node[name]["env"]
        for rank in node["ranks"]:
            seen = json.loads(Path(node["run_dir"], f"seen{rank}.json").read_text())
            assert seen["argv"] == ["sees.py", "--lr", "0.01", "it's"] == node["trainer"]["argv"][-4:]
            assert seen["cwd"] == node["trainer"]["cwd"]
            environment = {name: seen["env"].get(name) for name in node["trainer"]["env"]}
            assert masked(environment) == node["trainer"]["env"]


def differs_from_plan(file):
    """Return whether a sent file has another content or size than planned. Of a secret file, check only the mode."""
    sent_file = Path(file.dest)
    if file.secret:
        return sent_file.stat().st_mode & 0o777 != 0o600
    planned = Path(file.source).read_bytes()
    return sent_file.read_bytes() != planned or len(planned) != file.bytes


def masked(env):
    return {name: "***" if name == "GNNFLEET_TOKEN" else value for name, value in env.items()}


def test_own_script_finds_its_rank_and_its_part(own_script_run):
    wanted = {0: ("0", "0", "0"), 1: ("1", "0", "1"), 2: ("1", "1", "1")}  # node_rank, local_rank, part
    plan, _ = own_script_run
    for node in plan["nodes"]:
        for rank in node["ranks"]:
            seen = json.loads(Path(node["run_dir"], f"seen{rank}.json").read_text())
            env, (node_rank, local_rank, part) = seen["env"], wanted[rank]
            assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == (str(rank), "3", "127.0.0.1")
            assert (env["NODE_RANK"], env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == (node_rank, local_rank, "")
            assert int(env["MASTER_PORT"]) == plan["master_port"]
            assert set(seen["parts"]) >= {"manifest.json", "shared", f"part{part}"}
            rows = [path.parts[-5] for path in Path(node["data_dir"]).glob("part*/nodes/node/attrs/x.npy")]
            assert rows == [f"part{part}"], "a node holds the features of its own part only"
