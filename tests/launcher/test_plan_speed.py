"""Tests of the cost of planning for growing clusters, in function calls instead of seconds."""

from __future__ import annotations

import cProfile
import hashlib
import io
import pstats
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launcher.config.host_filter import filtered
from launcher.config.loader import load_config
from launcher.config.schema import NodeConfig
from launcher.plan import model, render
from launcher.plan.files import code_files
from launcher.plan.model import LaunchPlan
from launcher.plan.render import print_plan
from launcher.plan.serialize import to_json
from plan_kit import cluster, facts_of, parts_folder, plan_of


def config_of(folder: Path, nodes: int) -> Path:
    """Write a config of ``nodes`` hosts, and of one more that tests exclude."""
    path = folder / f"{nodes}.yml"
    path.write_text(
        f"defaults: {{venv: ~/v, env: {{A: b}}}}\nnodes:\n  - host: n[0001-{nodes + 1:04}].lab\n    devices: [0, 1]\n"
        "train: {batch_size: 9000}\ndata: {dataset: synthetic, topology: partitioned}\n"
    )
    return path


def planned_for(folder: Path, nodes: int) -> LaunchPlan:
    """Return a plan for ``nodes`` hosts. One more host and one device of each host are excluded."""
    config = filtered(load_config(config_of(folder, nodes)), (), ["n0002", "n*:1"])
    return plan_of(config, facts=facts_of(nodes), manifest=parts_folder(folder / f"parts{nodes}", nodes))


def calls(folder: Path, nodes: int) -> int:
    """Return the number of function calls that planning, printing and serialising take."""
    manifest = parts_folder(folder / f"parts{nodes}", nodes)
    facts, path = facts_of(nodes), config_of(folder, nodes)
    profile = cProfile.Profile()
    profile.enable()
    plan = plan_of(filtered(load_config(path), (), ["n0002", "n*:1"]), facts=facts, manifest=manifest)
    print_plan(plan, Console(file=io.StringIO()))
    to_json(plan)
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_code_that_a_printed_plan_only_counts_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, named = planned_for(tmp_path, 2), []
    monkeypatch.setattr(render, "_name", lambda node, file: named.append(file) or "")
    print_plan(plan, Console(file=io.StringIO()))
    assert named and not any(file in plan.code for file in named)


@pytest.mark.slow
def test_planning_cost_is_linear_in_the_number_of_nodes(tmp_path: Path) -> None:
    planned_for(tmp_path, 2)  # fills caches that are kept per process
    once, twice, four = (calls(tmp_path, nodes) for nodes in (40, 80, 160))
    assert (four - twice) / (twice - once) == pytest.approx(2, rel=0.1), (once, twice, four)


def test_code_and_parts_are_read_once_for_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    hashed: list[bytes] = []

    def file_sha256(path: Path) -> str:
        read.append(path)
        return "d1"

    def sha256(raw: bytes) -> Any:
        hashed.append(raw)
        return hashlib.sha256(raw)

    monkeypatch.setattr(model, "file_sha256", file_sha256)
    monkeypatch.setattr(model, "hashlib", SimpleNamespace(sha256=sha256))
    plan = planned_for(tmp_path, 30)
    assert sorted(read) == code_files()
    texts = [file for node in plan.nodes for file in node.files if file.content]
    assert len(hashed) == len(texts) - len(plan.nodes) + 1, "cluster.json is one text for all"


def lines_of(plan: LaunchPlan) -> list[str]:
    """Return the lines of the printed plan."""
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=200))
    return out.getvalue().splitlines()


def test_a_plan_of_many_nodes_is_a_page(tmp_path: Path) -> None:
    equal = lines_of(plan_of(cluster(*(NodeConfig(f"n{k:04}.lab", devices=(0, 1)) for k in range(1, 301)))))
    assert len(equal) < 30
    (line,) = (line.split() for line in equal if line.startswith("  node["))
    assert line[:5] == ["node[0-299]", "n[0001-0300].lab", "0-599", "0,1", "0-299"]
    assert line[5] == "n[0001-0300].lab:29600-29899"


def test_a_plan_of_many_different_nodes_is_cut_and_says_what_is_left_out() -> None:
    names = [f"{'abcdefg'[k % 7]}{k * k}" for k in range(300)]
    odd = (NodeConfig(name, devices=(0,) * (1 + k % 2), env={"SITE": str(k % 50)}) for k, name in enumerate(names))
    lines = lines_of(plan_of(cluster(*odd)))
    assert len(lines) < 60 and max(map(len, lines)) < 400
    assert "  … 284 more nodes: --verbose or --json" in lines
    shown = sum("tmux session" in line for line in lines)
    assert shown == 8 and lines[-1] == "  … 252 more nodes"


def test_code_is_listed_once_for_all_nodes(tmp_path: Path) -> None:
    plan = planned_for(tmp_path, 30)
    assert len(to_json(plan)) < 12 * len(to_json(planned_for(tmp_path, 2)))
    paths = [file.dest for file in plan.code]
    assert "launcher/node/control.py" in paths and len(paths) == len(code_files())
    assert not any(node.code_dir in file.dest for node in plan.nodes for file in node.files)
    assert plan.sent_files(plan.nodes[0]) == len(paths) + len(plan.nodes[0].files)


def test_each_node_is_sent_its_own_part_only(tmp_path: Path) -> None:
    for node in planned_for(tmp_path, 5).nodes:
        sent = {
            file.dest.removeprefix(f"{node.data_dir}/") for file in node.files if file.dest.startswith(node.data_dir)
        }
        mine = {f"part{node.node_rank}/{name}.npy" for name in ("nodes/node/attrs/x", "edges/node__to__node/indptr")}
        assert sent == mine | {"shared/nodes/node/seeds/train.npy", "manifest.json"}
