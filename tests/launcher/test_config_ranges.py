"""Tests of host ranges such as ``gnn[1-4]``, in configs and in messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.loader import load_config, to_yaml
from launcher.config.schema import ClusterConfig
from launcher.errors import ConfigError
from launcher.hostlist import MOST, RangeError, expand, fold

DATA = "data: {dataset: synthetic}\n"


def load(folder: Path, text: str, sets: Sequence[str] = ()) -> ClusterConfig:
    path = folder / "c.yml"
    path.write_text(text + DATA)
    return load_config(path, sets)


def logins(config: ClusterConfig) -> list[str]:
    return [node.login for node in config.nodes]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[08-11].lab", "node08.lab node09.lab node10.lab node11.lab"),
        ("10.0.0.[9-11]", "10.0.0.9 10.0.0.10 10.0.0.11"),
        ("n[1-3,7]r[1-2]", "n1r1 n1r2 n2r1 n2r2 n3r1 n3r2 n7r1 n7r2"),
        ("u@node[01-02]:2222", "u@node01:2222 u@node02:2222"),
        ("gnn1:[2201-2203]", "gnn1:2201 gnn1:2202 gnn1:2203"),
        ("node[0-10]", "node0 node1 node2 node3 node4 node5 node6 node7 node8 node9 node10"),
        ("n[007]", "n007"),
        ("[::1]:22", "[::1]:22"),
        ("u@[fe80::1%eth0]:[22-23]", "u@[fe80::1%eth0]:22 u@[fe80::1%eth0]:23"),
        ("fe80::[1-2]", "fe80::1 fe80::2"),
        ("gnn1", "gnn1"),
    ],
)
def test_a_range_is_expanded(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ("node01.lab node02.lab node03.lab", "node[01-03].lab"),
        ("10.0.0.9 10.0.0.10 gpu1 gpu3", "10.0.0.[9-10], gpu1, gpu3"),
        ("n1r1 n1r2 n2r1", "n1r[1-2], n2r1"),
        ("a1b1 a2b1 a2b2", "a[1-2]b1, a2b2"),
        ("9 010 11", "9, 010, 11"),
        ("a a", "a, a"),
        ("", ""),
    ],
)
def test_names_are_folded_for_messages(names: str, folded: str) -> None:
    assert fold(names.split()) == folded


@settings(max_examples=40)
@given(st.lists(st.from_regex(r"\A[ab]{0,2}[0-9]{1,3}([.x][0-9]{1,2})?\Z"), max_size=30))
def test_folding_loses_nothing(names: list[str]) -> None:
    assert [name for text in fold(names).split(", ") if text for name in expand(text)] == names


@given(st.text(alphabet="n09[]-,: a", max_size=20))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        assert len(expand(text)) <= MOST
    except RangeError as error:
        assert f"`{text}`" in str(error)


def test_a_range_with_line_breaks_is_refused_in_one_line() -> None:
    with pytest.raises(RangeError, match=r"^`x a\[b c\]`: expected numbers in brackets") as caught:
        expand("x\na[b\u2028c]")
    assert len(str(caught.value).splitlines()) == 1


def test_ranges_among_nodes(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "defaults: {user: u}\n"
        "nodes:\n  - node[08-10].lab\n  - {host: 'v@10.0.0.[1-2]:22', procs: 2}\n"
        "  - host: gpu[1-2]\n    devices: [0, 1]\n",
    )
    assert logins(config) == [
        *("u@node08.lab", "u@node09.lab", "u@node10.lab", "v@10.0.0.1:22", "v@10.0.0.2:22", "u@gpu1", "u@gpu2")
    ]
    assert [node.nproc for node in config.nodes] == [1, 1, 1, 2, 2, 2, 2]
    assert config.num_parts == 7
    saved = tmp_path / "saved.yml"
    saved.write_text(to_yaml(config))
    assert load_config(saved) == config


@pytest.mark.parametrize("nodes", ["node[01-03]", "['node[01-03]']", "\n  - node[01-03]", "\n  - host: node[01-03]"])
def test_a_range_in_each_notation_of_nodes(tmp_path: Path, nodes: str) -> None:
    assert logins(load(tmp_path, f"nodes: {nodes}\n")) == ["node01", "node02", "node03"]


def test_set_counts_nodes_after_expansion(tmp_path: Path) -> None:
    text = "nodes:\n  - node[01-03]\n  - {host: 'gpu[1-2]', procs: 5}\n"
    config = load(tmp_path, text, ["nodes.1.procs=2", "nodes.4.procs=3"])
    assert [node.nproc for node in config.nodes] == [1, 2, 1, 5, 3]
    assert logins(load(tmp_path, text, ["nodes=n[1-2]"])) == ["n1", "n2"]


MISTAKES = {
    "nodes: [a, node[01-04]]\n": [
        '1: not valid YAML: a host range inside [ ] or { } must be quoted, as ["node[01-04]"], or stand on a line of '
        "its own"
    ],
    "nodes:\n  - {host: node[01-04], procs: 2}\n": [
        '2: not valid YAML: a host range inside [ ] or { } must be quoted, as ["node[01-04]"], or stand on a line of '
        "its own"
    ],
    "nodes: [a [b]]\n": ["1: not valid YAML: a list in [ ] without `,` or the closing `]`"],
    "nodes:\n  - a\n  - n[3-1]\n  - n[1-010]\n  - n[1-5000]\n  - n[1-2\n  - n[a-c]\n  - n[]\n": [
        "3: nodes.1.host: `n[3-1]`: 3-1 runs backwards; write 1-3",
        "4: nodes.2.host: `n[1-010]`: 1 and 010 have different numbers of leading zeros; write 001-010 or 1-10",
        "5: nodes.3.host: `n[1-5000]` expands to 5,000 hosts; a range may expand to 4,096 at most",
        "6: nodes.4.host: `n[1-2`: its brackets do not match; write a range as node[01-16]",
        "7: nodes.5.host: `n[a-c]`: expected numbers in brackets, as node[01-16] or node[1-3,7], found `a-c`",
        "8: nodes.6.host: `n[]`: expected numbers in brackets, as node[01-16] or node[1-3,7]",
    ],
    "defaults: {host: 'n[1-2]'}\nnodes: [{port: 1}, {port: 2}]\n": [
        "1: defaults.host: `n[1-2]` expands to 2 hosts; list it under nodes"
    ],
    "nodes:\n  - a\n  - host: n[1-16]\n    procs: 0\n    prt: 1\n": [
        "4: nodes.1.procs: must be at least 1 and at most 1024; found 0 (also nodes.[2-16])",
        "5: unknown key `prt` in nodes.1; did you mean `port`? (also nodes.[2-16])",
    ],
    "nodes:\n" + "".join(f"  - {{host: n{k}, prcs: 2}}\n" for k in range(5)): [
        "2: unknown key `prcs` in nodes.0; did you mean `procs`? (also nodes.[1-4])"
    ],
    "nodes:\n" + "".join(f"  - {{host: n{k}, prcs: 2}}\n" for k in range(3)): [
        f"{2 + k}: unknown key `prcs` in nodes.{k}; did you mean `procs`?" for k in range(3)
    ],
    "nodes:\n  - n[1-2]:70000\n": ["2: nodes.0.port: must be at least 1 and at most 65535; found 70000 (also nodes.1)"],
    "defaults: {workdir: /w}\nnodes:\n  - n[1-3]\n  - n[3-4]\n": [
        "4: nodes.3 has the same host and workdir as nodes.2 (n3, /w); give each node its own workdir, or put "
        "{node_rank} into the path"
    ],
    "defaults: {devices: [0, 1]}\nnodes:\n  - n[1-3]\n  - n[3-4]\n": [
        "1: nodes.3.devices: device 0 of n3 is already listed in nodes.2; nodes on one host must use different devices"
    ],
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: repr(text)[-50:])
def test_mistakes_are_reported_once_with_their_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert [f"{problem.line}: {problem.message}" for problem in caught.value.problems] == MISTAKES[text]


def test_a_host_may_run_several_nodes(tmp_path: Path) -> None:
    text = "nodes:\n  - {host: gpu1, devices: [0, 1]}\n  - {host: gpu1, devices: [2, 3]}\n  - n[1-2]\n  - n[2-3]\n"
    assert logins(load(tmp_path, text)) == ["gpu1", "gpu1", "n1", "n2", "n2", "n3"]
