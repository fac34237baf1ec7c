"""Test of nodes whose processes run in containers of Charliecloud (``wrap``): check, training, stop, what stays."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launching import REPOSITORY
from netns import Host, NetCluster
from operator_kit import Operator, run_processes
from waiting import wait_until

MARK = "etc/gnnfleet-image"

needs_charliecloud = pytest.mark.skipif(shutil.which("ch-run") is None, reason="no ch-run (apt install charliecloud)")

SHOWN = [str(REPOSITORY), sys.base_prefix, os.environ.get("GNNFLEET_KERNELS", ""), "/usr"]


def make_image(host: Host) -> str:
    """Make an image on the host, a folder: of the host's /usr, and with a file that only the image has."""
    root = host.root_path("~/image")
    for folder in ("usr", "etc", "proc", "sys", "dev", "tmp", "root", "run", "home", "mnt", *SHOWN):
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("hosts", "resolv.conf", "passwd", "group"):
        (root / "etc" / name).touch()
    (root / MARK).write_text("the image\n")
    return f"{host.home}/image"


@needs_charliecloud
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_runs_in_containers(make_cluster: Callable[..., NetCluster], tmp_path: Path) -> None:
    cluster = make_cluster(2)
    cluster.know_neighbours()
    user, config = Operator(cluster, tmp_path / "home"), tmp_path / "cluster.yml"
    images = [make_image(host) for host in cluster.hosts]
    wrap = ["ch-run", *(f"--bind={folder}" for folder in SHOWN if folder)]
    common = {"user": "root", "workdir": "/tmp/wrapped", "python": sys.executable}
    common["env"] = {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"], "FROM_CONFIG": "two words"}

    def write(*words: list[str], **more: Any) -> None:
        nodes = [{"host": host.address, **common, "wrap": one} for host, one in zip(cluster.hosts, words, strict=True)]
        data = {
            "dataset": "synthetic",
            "options": {"num_nodes": 500, "avg_degree": 4},
            "folder": str(tmp_path / "parts"),
        }
        train = {"fanouts": [4, 2], "hidden": 16, "epochs": 2, "batch_size": 64}
        config.write_text(yaml.safe_dump({"nodes": nodes, "data": data, "train": train, **more}))

    # What is wrong with a container is said before anything is sent.
    write(["no-such-program", "x"], [*wrap, f"{images[1]}-gone", "--"])
    wrong = user.gnnfleet("check", "--config", str(config))
    said = " ".join(wrong.output.split())
    assert wrong.status != 0 and "gnnfleet setup" not in said, wrong.output
    assert "the container `no-such-program x`" in said and "exec: no-such-program: not found" in said, wrong.output
    assert "image-gone: No such file" in said and "needs the program and the image on the host" in said, wrong.output
    write(["unshare", "--pid", "--net", "--fork", "env"], ["env", "-i", "unshare", "--mount", "sh", "-c", HIDE, "sh"])
    wrong = user.gnnfleet("check", "--config", str(config))
    said = " ".join(wrong.output.split())
    assert "the container has processes of its own" in said and "network of its own" in said, wrong.output
    assert "does not show /tmp/wrapped" in said and "does not get environment variables" in said, wrong.output

    write(*([*wrap, image, "--"] for image in images))
    checked = user.gnnfleet("check", "--config", str(config))
    assert checked.status == 0, checked.output
    hosts = user.gnnfleet("hosts", "--config", str(config), "--speed")
    assert hosts.status == 0 and hosts.output.count("GFLOP/s, memory") == 2, hosts.output  # with the image's torch
    trained = user.gnnfleet("launch", "--config", str(config), "--run-id", "train", timeout=600)
    assert trained.status == 0, trained.output
    assert run_processes(cluster) == []

    # A script in the container: it is stopped, then the supervisor of a node is killed.
    show = f"import os; print(open('/{MARK}').read(), os.environ['FROM_CONFIG'], flush=True)"
    (user.cwd / "job.py").write_text(f"{show}\nimport time; time.sleep(3600)\n")
    for run_id in ("stopped", "killed"):
        words = ("launch", "--config", str(config), "--run-id", run_id, "--detach", "--", "python", "job.py")
        launched = user.gnnfleet(*words, timeout=300)
        assert launched.status == 0, launched.output
        for k, host in enumerate(cluster.hosts):
            log = f"/tmp/wrapped/runs/{run_id}/node{k}/logs/rank{k}.log"
            wait_until(lambda host=host, log=log: "two words" in host.run(["cat", log], check=False).stdout)
            assert "the image" in host.run(["cat", log]).stdout
        if run_id == "stopped":
            stopped = user.gnnfleet("stop", run_id, timeout=300)
            assert "no process of it is left on its 2 nodes" in stopped.output, stopped.output
        else:
            state = json.loads(cluster.hosts[1].run(["cat", "/tmp/wrapped/runs/killed/node1/state.json"]).stdout)
            cluster.hosts[1].run(["kill", "-9", str(state["pid"])])
        wait_until(lambda: run_processes(cluster) == [])


#: Hides /tmp/wrapped of the host.
HIDE = 'mount -t tmpfs none /tmp/wrapped && exec "$@"'
