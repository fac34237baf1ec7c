"""Tests of ``cluster_group``, which makes a ``Group`` of the SSH library fabric from the hosts of a cluster.yml."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UnreachableError, UsageError
from launcher.transport.tasks import cluster_group
from launching import local_config, write_config
from netns import NetCluster


@pytest.fixture
def config(cluster: NetCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(cluster.operator_home))
    return write_config(tmp_path, [{"host": host.address, "user": "root"} for host in cluster.hosts])


def test_a_group_runs_commands_and_copies_files_on_every_host(
    cluster: NetCluster, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text("hello")
    with cluster_group(config) as group:
        results = group.run("hostname; cat note 2>/dev/null", hide=True, warn=True)
        group.put(str(tmp_path / "note"), "note")
        again = group.run("cat note", hide=True)
        lines = [connection.transport for connection in group]
    names = {connection.host: result.stdout.split() for connection, result in results.items()}
    assert names == {host.address: [host.name] for host in cluster.hosts}
    assert [result.stdout for result in again.values()] == ["hello"] * 3
    assert not any(line.is_active() for line in lines)


def test_invalid_hosts_and_groups_are_one_clear_error(cluster: NetCluster, config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="transport: local"), cluster_group(local_config(tmp_path, [1])):
        pass
    write_config(tmp_path, [{"host": f"{cluster.prefix}.99", "user": "root"}], run={"connect_timeout": 1})
    with pytest.raises(UnreachableError, match=r"node0 \(root@"), cluster_group(config):
        pass
