"""A fabric group over the hosts of a cluster.yml."""

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


def test_commands_and_files_go_to_every_host_and_the_lines_are_closed(
    cluster: NetCluster, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text("hello")
    with cluster_group(config) as group:
        said = group.run("hostname; cat note 2>/dev/null", hide=True, warn=True)
        group.put(str(tmp_path / "note"), "note")
        again = group.run("cat note", hide=True)
        lines = [connection.transport for connection in group]
    names = {connection.host: result.stdout.split() for connection, result in said.items()}
    assert names == {host.address: [host.name] for host in cluster.hosts}
    assert [result.stdout for result in again.values()] == ["hello"] * 3
    assert not any(line.is_active() for line in lines)


def test_what_cannot_be_is_one_clear_error(cluster: NetCluster, config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="transport: local"), cluster_group(local_config(tmp_path, [1])):
        pass
    write_config(tmp_path, [{"host": f"{cluster.prefix}.99", "user": "root"}], run={"connect_timeout": 1})
    with pytest.raises(UnreachableError, match=r"node0 \(root@"), cluster_group(config):
        pass
