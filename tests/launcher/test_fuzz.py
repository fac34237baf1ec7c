"""Fuzz tests of config files, files of other launchers and manifests: each file is read, or refused with a message."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from fuzz_kit import HOSTILE, fuzz, unhurried
from golden_kit import GOLDEN
from launcher.config.importers.base import Flags, dataset_overrides
from launcher.config.importers.detect import read_foreign
from launcher.config.importers.export import cluster_yml
from launcher.config.importers.pyg_command import parse_remote
from launcher.config.loader import load_config, overridden, to_yaml
from launcher.errors import ConfigError, FleetError, UsageError
from launcher.files import CODE_ROOT
from launcher.init.request import dataset_of
from launcher.plan.partition import read_partition_files
from plan_kit import parts_folder

pytestmark = unhurried

CONFIGS = [
    path.read_text() for path in (*sorted((CODE_ROOT / "templates").glob("*.yml")), *sorted(GOLDEN.glob("*.yml")))
]
ALIASES = """\
defaults: &d {env: &e {A: b}}
nodes: [{<<: *d, host: a}, *n]
train: &n {fanouts: [2, 1], epochs: 2}
data: {dataset: synthetic}
"""
FOREIGN = [
    *(
        file.read_text()
        for case in sorted((GOLDEN / "foreign").iterdir())
        for file in sorted(case.iterdir())
        if file.name != "words" and "ansible" not in case.name
    ),
    "a slots=2\nb slots=3 max_slots=4\n",
    "10.0.0.1 1234\n- u@h:22 5\n[::1] 3\nfe80::1\n",
]
REMOTE = [
    "cd /x; source ~/venv/bin/activate && A=b CUDA_VISIBLE_DEVICES=0,1 python -m x train.py --a 'b c' > log",
    "conda activate pyg; cd $HOME/x; /opt/conda/envs/pyg/bin/python3.10 e2e_homo.py --flag=1",
]
OVERRIDES = [
    "nodes.0.procs=2",
    "nodes.*.env.A=b",
    "train.fanouts=[1,2]",
    "nodes=node[1-3]",
    "data.options={a: [1]}",
    "nodes=2",
]


def test_configs(tmp_path: Path) -> None:
    path = tmp_path / "c.yml"

    def read(text: str) -> None:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        config = load_config(path)
        path.write_text(to_yaml(config))
        assert to_yaml(load_config(path)) == to_yaml(config)

    fuzz([*CONFIGS, ALIASES], read, ConfigError)


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "c.yml"
    path.write_text("nodes: [a, {host: b, env: {A: b}}]\ndata: {dataset: synthetic}\n")
    fuzz(OVERRIDES, lambda text: load_config(path, text.split("\n")), ConfigError)


def test_files_of_other_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A mutated file of another launcher that can be read gives the same config after it is imported as a cluster.yml.
    monkeypatch.setattr(shutil, "which", lambda *given, **more: None)  # inventories are for Ansible to read
    path, ours = tmp_path / "hosts", tmp_path / "ours" / "c.yml"
    ours.parent.mkdir()

    def read(text: str) -> None:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        foreign = read_foreign(path, Flags(dataset="synthetic"))
        if foreign is None:
            return
        sets = ("data={dataset: synthetic, folder: /parts}",)
        config = load_config(path, sets, foreign=foreign)
        tree = overridden(path, sets, foreign, lambda problem: None)
        ours.write_text(cluster_yml(foreign, tree, "hosts", ours.parent))
        assert to_yaml(load_config(ours)) == to_yaml(config)

    fuzz(FOREIGN, read, FleetError)


def test_commands_of_other_launchers() -> None:
    fuzz(REMOTE, parse_remote, UsageError)


def test_manifests(tmp_path: Path) -> None:
    # A mutated manifest that is accepted names only files below the folder of the manifest.
    folder = Path(parts_folder(tmp_path, 2).folder)
    path = folder / "manifest.json"
    seed = path.read_text()
    values = [json.dumps(text) for text in HOSTILE]
    seeds = [
        seed,
        json.dumps(json.loads(seed), indent=1),
        '{"path": "shared/../../x", "bytes": -1, "nodes": {"a": []}}',
    ]
    seeds.append(random.Random(0).choice(values).join(seed.split('"f1"')))

    def read(text: str) -> None:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        found = read_partition_files(folder)
        assert found is not None
        for file in found.files:
            assert (folder / file.path).resolve().is_relative_to(folder) and file.bytes >= 0
        found.of_parts([0, 1], replicated=True)

    fuzz(seeds, read, FleetError)


def test_a_name_that_no_file_can_have_is_a_dataset(tmp_path: Path) -> None:
    # Found by fuzzing: a name too long for the file system raises OSError.
    name = "a" * 3000 + ".pt"
    path = tmp_path / "glt.yml"
    path.write_text(f"nodes: [h]\nports: [22]\nusernames: [u]\ndataset: {name}\n")
    foreign = read_foreign(path, Flags())
    assert foreign is not None
    with pytest.raises(FleetError, match="there is no dataset `aaa"):
        load_config(path, foreign=foreign)
    for text in (name, "~nobody-of-this-name/graph.pt"):
        assert ("data.dataset", text) in dataset_overrides(text)
        with pytest.raises(UsageError, match="no file or folder"):
            dataset_of(text)
