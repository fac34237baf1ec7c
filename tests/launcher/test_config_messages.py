"""Golden test of every message about cluster.yml, host ranges, filters and leases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from golden_kit import check_messages
from launcher.cli import main
from launcher.node.leases import Lease, LeaseError, describe, held, resource_label, take, this_process

DATA = "data: {dataset: synthetic}\n"
FILES = {
    "nodes: [a, node[01-04]]": "a range that YAML takes for a list",
    "nodes:\n  - {host: node[01-04], procs: 2}": "the same in braces",
    "nodes:\n  - n[3-1]": "a range backwards",
    "nodes:\n  - n[1-010]": "unequal zeros",
    "nodes:\n  - n[1-5000]": "a range too large",
    "nodes:\n  - n[1-100]r[1-100]": "two ranges too large together",
    "nodes:\n  - n[1-4": "a bracket without its other half",
    "nodes:\n  - n[a-d]": "a range of letters",
    "nodes:\n  - n[]": "a range of nothing",
    "defaults: {host: 'n[1-2]'}\nnodes: [{port: 1}]": "a range in defaults",
    "nodes:\n  - host: n[1-16]\n    prcs: 2": "a mistake in a range's keys is told once",
    "nodes:\n  - n[1-16]:70000": "a port that cannot be",
    "nodes:\n  - a b": "no host",
    "nodes:\n  - {host: u@a, user: v}": "a user twice",
    "nodes: 4": "a number of nodes that are not here",
    "nodes: []": "no nodes",
    "transport: local\nnodes: [gnn1]": "a host elsewhere, started here",
    "nodes:\n  - {host: a, devices: [0, 1, 0]}": "a device twice",
    "nodes:\n  - {host: a, devices: [0, 1]}\n  - {host: a, devices: [1, 2]}": "a device of two nodes",
    "nodes:\n  - {host: a, devices: [0, 1], procs: 3}": "more processes than devices",
    "nodes:\n  - {host: a, venv: /v, conda: c}": "two environments",
    "nodes:\n  - {host: a, env: {RANK: 1}}": "a variable that is ours",
    "nodes:\n  - {host: a, workdir: work}": "a relative folder of a node",
    "defaults: {workdir: /w}\nnodes:\n  - n[1-3]\n  - n[3-4]": "a folder of two nodes",
    "nodes: [a]\ntrain: {batch_size: 0, lr: fast}": "several mistakes at once",
    "nodes: 'n[1-4]'\ntrain: {batch_size: 2}": "fewer seeds than processes",
    "nodes: [{host: a, devices: [0]}, b]\ntrain: {backend: nccl}": "nccl without devices",
    "nodes: 'n[1-4]'\nrun: {service_port: 65534}": "ports beyond the last",
    "nodes: 'n[1-4]'\nrun: {service_port: 7000, master_port: 7002}": "a port taken twice",
    "nodes: 'n[1-4]'\nrun: {control_port: 29511, master_port: 29511}": "another port taken twice",
    "nodes: 'n[1-4]'\nrun: {service_port: 7000, control_port: 7000}": "and another",
    "nodes: 'n[1-4]'\nrun: {on_interrupt: ignore}": "a word that is none of the choices",
}
CLUSTER = (
    "nodes:\n  - node[01-04].lab\n  - {host: 'gpu[1-2].lab', devices: [0, 1, 3]}\n  - {host: old, address: 10.0.0.9}\n"
    "run: {master_addr: node01.lab}\n"
)
CHOICES = [
    "--include node07",
    "--exclude node[03-06]",
    "--include gpu1:2",
    "--include gpu*:0-2",
    "--exclude node02:0",
    "--include node[04-01]",
    "--include bob@node01",
    "--include node03 --exclude node0*",
    "--exclude node01",
    "--include x --set train.lr=fast",
]


@pytest.fixture
def errors_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """Yield a function that runs ``gnnfleet plan`` for a config, and returns stderr and the exit status."""
    monkeypatch.chdir(tmp_path)

    def plan(text: str, words: list[str]) -> str:
        Path("cluster.yml").write_text(text.rstrip() + "\n" + DATA)
        status = main.run(["plan", "--config", "cluster.yml", *words])
        return f"{capsys.readouterr().err.strip()}\n(exit status {status})"

    yield plan


def test_messages_of_configs_filters_and_leases(  # type: ignore[no-untyped-def]
    errors_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(title, indent(text, "    ") + "\n" + errors_of(text, [])) for text, title in FILES.items()]
    found += [(choice, errors_of(CLUSTER, choice.split())) for choice in CHOICES]
    found += [(title, text.replace(str(tmp_path), "/tmp")) for title, text in lease_messages(tmp_path, monkeypatch)]
    check_messages("config", found)


def lease_messages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    lease = Lease("cuda:0", "toy-20261121-120301-ab12", 1, "alice", 4711, 1, "b", 1795262591.0, "alice@laptop")
    yield "a device that is held", f"{resource_label(lease.resource)} is {describe(lease)}"
    shared = lease._replace(resource="port:29500", user="ubuntu")
    text = f"{resource_label(shared.resource)} is {describe(shared)}"
    yield "a port that is held, through a login that several share", text
    leases = folder / "gnnfleet-leases"
    monkeypatch.setenv("GNNFLEET_LEASES", str(leases))
    leases.symlink_to("/etc")
    yield "a link in place of the folder", refusal()
    monkeypatch.setenv("GNNFLEET_LEASES", str(folder / "nowhere" / "gnnfleet-leases"))
    yield "a folder that cannot be made", refusal()


def refusal() -> str:
    assert os.environ["GNNFLEET_LEASES"]
    with pytest.raises(LeaseError) as caught:
        take(["cuda:0"], this_process("run", 0))
        held()
    return str(caught.value)
