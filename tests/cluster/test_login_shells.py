"""Test of hosts with other login shells than bash, and of a user name that contains @: check, launch, logs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from launching import REPOSITORY
from netns import DIRECTORY_USER, NetCluster
from netns_tools import Machine

SHELLS = ("tcsh", "fish", "zsh")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_hosts_may_have_any_login_shell(make_cluster, tmp_path) -> None:
    there = dict(enumerate(filter(None, map(shutil.which, SHELLS))))
    if not there:
        pytest.skip("no other login shells on this machine (apt install tcsh fish zsh)")
    cluster: NetCluster = make_cluster(len(there), machines={k: Machine(shell=path) for k, path in there.items()})
    nodes = "".join(f"  - {DIRECTORY_USER}@{host.address}\n" for host in cluster.hosts)
    (tmp_path / "train.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:], flush=True)\n")
    kernels = {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"]}
    (tmp_path / "cluster.yml").write_text(
        f"nodes:\n{nodes}defaults: {{python: {sys.executable}, workdir: '~/it is !1/node{{node_rank}}'"
        f", env: {kernels}}}\n"
        "host_keys: accept-new\ndata: {dataset: synthetic, options: {num_nodes: 200}}\n"
    )
    env = {**os.environ, **cluster.environment()}
    own = ["--", "python", "train.py", "wo'w!", "a\nb"]
    for words in (["check", "--config", "cluster.yml"], ["--config", "cluster.yml", "--run-id", "shells", *own]):
        argv = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    for k in there:
        log = (tmp_path / f"runs/shells/logs/node{k}/rank{k}.log").read_text()
        assert f"rank {k} " + repr(["wo'w!", "a\nb"]) in log
    words = ["clean", "runs", "--config", "cluster.yml", "--older-than", "0", "--yes"]
    done = subprocess.run([*argv[:2], *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"on {len(there)} host" in done.stdout, done.stdout + done.stderr
    for k, host in enumerate(cluster.hosts):
        assert [path.name for path in host.root_path(f"~/it is !1/node{k}/runs").iterdir()] == []
        assert host.root_path(f"~/it is !1/node{k}/code").is_dir()
