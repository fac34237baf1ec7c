"""Tests of ``gnnfleet init``: written files (golden/init), messages, and what it finds on a machine."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fake_transport import FakeTransport, wire
from findings_kit import VERSIONS, gpu, probe_of
from golden_kit import GOLDEN, check_messages, check_text
from launcher.cli import main
from launcher.config.loader import load_config
from launcher.errors import AuthError, HostKeyError, TransportError, UnreachableError
from launcher.init import wizard
from launcher.init.draft import pace
from launcher.init.request import dataset_of
from launcher.node.programs import environments, packages
from terminal import Terminal

CUDA = {**VERSIONS, "torch": "2.13.0", "cuda": "12.6", "nccl": "2.27.5"}
OLD = {**VERSIONS, "torch": "2.4.1+cpu", "numpy": "1.26.4"}
BARE = dict.fromkeys(VERSIONS, "") | {"python": "3.11.2", "torch": "2.13.0+cpu"}

_serial = itertools.count()
Machine = FakeTransport | TransportError


def env(path: str = "~/gnnfleet-venv", key: str = "venv", versions: Mapping[str, str] = VERSIONS) -> dict[str, Any]:
    return {"key": key, "path": path, "versions": versions}


def machine(*found: dict[str, Any], shares: tuple[str, ...] = (), one: bool = True, **facts: Any) -> FakeTransport:
    """Return a fake host with the Python environments ``found`` and the network file systems ``shares``.

    one: whether all hosts see the same files in ``shares``. facts: further results of the node program ``probe``.
    """
    k = next(_serial)
    addresses = [["lo", "127.0.0.1"], ["eth0", f"10.0.0.{k}"]]
    fake = FakeTransport(target="host").on_program("network", wire())
    fake.on_program("probe", lambda request: probe_of(k, addresses=addresses, boot_id=f"b{k}", **facts))
    fake.on_program("environments", lambda request: {"environments": found, "shares": shares})
    return fake.on_program(
        "folders", lambda request: {"written": True, "seen": one, "identity": [], "op": request["op"]}
    )


def hetero_graph(folder: Path) -> str:
    """Write a graph.pt that init recognises as ``HeteroData``: an archive of torch.save without tensors."""
    with zipfile.ZipFile(folder / "graph.pt", "w") as archive:
        archive.writestr("graph/data.pkl", pickle.dumps({"_global_store": {}, "_node_store_dict": {}}, 2))
    return "graph.pt"


def tables(folder: Path) -> str:
    users = "".join(f"u{k},{20 + k % 40},{'ab'[k % 2]},{('train', 'val', 'test')[k % 3]}\n" for k in range(60))
    ratings = "".join(f"u{k * 7 % 60},{1000 + k % 30},{k % 5 + 0.5}\n" for k in range(300))
    (folder / "shop").mkdir()
    (folder / "shop/users.csv").write_text("user_id,age,segment,fold\n" + users)
    (folder / "shop/items.csv").write_text("sku,price\n" + "".join(f"{1000 + k},{k / 4}\n" for k in range(30)))
    (folder / "shop/ratings.csv").write_text("user_id,sku,stars\n" + ratings)
    return "shop"


def facts(folder: Path) -> str:
    lines = [f"e{k}\tr{j}\te{(k + j + 1) % 60}\n" for k in range(60) for j in range(3)]
    (folder / "wordnet").mkdir()
    for name, some in {"train": lines[:160], "valid": lines[160:170], "test": lines[170:]}.items():
        (folder / "wordnet" / f"{name}.txt").write_text("".join(some))
    return "wordnet"


def pairs(folder: Path) -> str:
    """Write users and what they like, without names of columns, in two files."""
    rows = [f"{1 + user}\t{1 + (user * 7 + k * k) % 60}" for user in range(40) for k in range(8)]
    shop = folder / "likes"
    shop.mkdir()
    (shop / "train.tsv").write_text("\n".join(rows[: 7 * len(rows) // 8]) + "\n")
    (shop / "test.tsv").write_text("\n".join(rows[7 * len(rows) // 8 :]) + "\n")
    return str(shop)


def timed_links(folder: Path) -> str:
    """Write tables without labels and splits. The ratings have times."""
    tables(folder)
    for name, columns in (("users", [0, 1]), ("ratings", [0, 1])):
        path = folder / "shop" / f"{name}.csv"
        rows = [[line.split(",")[k] for k in columns] for line in path.read_text().splitlines()]
        times = ["at", *(f"2024-03-{1 + k % 28:02}" for k in range(len(rows)))] if name == "ratings" else []
        rows = [[*row, time] for row, time in zip(rows, times, strict=False)] if times else rows
        path.write_text("".join(",".join(row) + "\n" for row in rows))
    return "shop"


def task_tables(folder: Path) -> str:
    """Write customers, products, orders, clicks without ids, and a table of what is to be predicted of customers."""
    stamp = [f"2024-{1 + k % 12:02}-{1 + k % 28:02} 10:00:00" for k in range(300)]
    lines = {
        "customers": ["customer_id,age", *(f"c{k},{20 + k % 40}" for k in range(30))],
        "products": ["sku,price", *(f"p{k},{k / 4}" for k in range(20))],
        "orders": [
            "order_id,customer_id,sku,bought_at,amount",
            *(f"{k},c{k % 30},p{k * 7 % 20},{stamp[k]},{1 + k % 3}" for k in range(200)),
        ],
        "clicks": ["customer_id,sku,clicked_at", *(f"c{k % 30},p{k * 3 % 20},{stamp[k]}" for k in range(300))],
        "churn": [
            "customer_id,at,churned",
            *(f"c{k % 30},2024-{1 + k // 30:02}-01,{'' if k % 9 == 0 else k % 2}" for k in range(240)),
        ],
    }
    (folder / "shop").mkdir()
    for name, rows in lines.items():
        (folder / f"shop/{name}.csv").write_text("\n".join(rows) + "\n")
    return "shop"


def lists(folder: Path) -> str:
    """As ``task_tables``, but what is to be predicted are the products that customers buy next."""
    task_tables(folder)
    (folder / "shop/churn.csv").unlink()
    rows = [f"c{k % 30},2024-{1 + k // 30:02}-01,p{(k * 7 + j) % 20}" for k in range(240) for j in range(1 + k % 3)]
    (folder / "shop/next.csv").write_text("\n".join(["customer_id,at,sku", *rows]) + "\n")
    return "shop"


def gpus(*numbers: int, **changes: Any) -> dict[str, Any]:
    made = [gpu(number, "NVIDIA H100", **changes) for number in numbers]
    return {"gpus": made, "devices": [one["name"] for one in made], "driver": "560.35.03", "versions": CUDA}


def mixed() -> dict[str, Any]:
    busy = gpus(0, 1, 2)
    busy["gpus"][1]["used"] = 40_000
    busy["gpus"][2]["mig"] = True
    return busy


@dataclass(frozen=True)
class Case:
    words: str
    machines: tuple[Machine, ...]
    status: int = 0
    file: Callable[[Path], str] | None = None
    table: list[str] = field(default_factory=list)


GONE = UnreachableError("no answer on port 22 within 10 s", host="gnn2", node_rank=1, remedy="is the machine up?")
CASES = {
    "two_cpu_nodes": Case("gnn1,gnn2 --yes", (machine(env()), machine(env()))),
    "unequal_gpus": Case(
        "gpu[1-3] old1 --user alice --dataset ogbn-products",
        (
            machine(env(versions=CUDA), **gpus(0, 1, 2, 3)),
            machine(env(versions=CUDA), env("~/other", versions=OLD), **mixed()),
            machine(env("~/miniforge3/envs/gnn", "conda", CUDA), env("/usr/bin/python3", "python", BARE), **gpus(0)),
            machine(env(), **gpus(0) | {"versions": VERSIONS}),
        ),
    ),
    "one_left_out": Case("gnn1 gnn2 gnn3 --yes", (machine(env()), GONE, machine(env())), status=3),
    "no_python_there": Case("gnn1 gnn2 --yes --no-check", (machine(), machine(env(versions=BARE)))),
    "most_common_versions": Case(
        "gnn[1-3] --yes",
        (
            machine(env("~/a", versions={**VERSIONS, "torch": "2.14.0"}), env("~/b")),
            machine(env("~/b")),
            machine(env("~/old", versions=OLD), env("~/b"), env("/usr/bin/python3", "python", BARE)),
        ),
    ),
    "same_host_twice": Case(
        "pair pair --dataset ogbn-arxiv --no-check", (machine(env(versions=CUDA), **gpus(0, 1, 2)),) * 2
    ),
    "shared_home": Case(
        "gnn1 gnn2 --yes --no-check",
        (machine(env(), shares=("/home/ann", "/tmp/x")), machine(env(), shares=("/home/ann",))),
    ),
    "not_shared": Case(
        "gnn1 gnn2 --yes --no-check --shared /nfs/gnn",
        (machine(env(), shares=("/nfs/gnn",)), machine(env(), shares=("/nfs/gnn",), one=False)),
    ),
    "shared_folder": Case(
        "gnn1 gnn2 --yes --no-check --shared /nfs/gnn",
        (machine(env(), shares=("/nfs/gnn",)), machine(env(), shares=("/nfs/gnn",))),
    ),
    "own_hetero_graph": Case(
        "gnn1 alice@gnn2:2222 --dataset {file} --conda gnn --key id --no-check",
        (machine(env("~/miniforge3/envs/gnn", "conda")), machine(env("/opt/conda/envs/gnn", "conda"))),
        file=hetero_graph,
    ),
    "own_tables": Case(
        "gnn1 gnn2 --dataset {file} --yes --no-check", (machine(env()), machine(env())), file=tables
    ),
    "own_task": Case(
        "gnn1 gnn2 --dataset {file} --yes --no-check", (machine(env()), machine(env())), file=task_tables
    ),
    "own_lists": Case(
        "gnn1 gnn2 --dataset {file} --yes --no-check", (machine(env()), machine(env())), file=lists
    ),
    "own_pairs": Case(
        "gnn1 gnn2 --dataset {file} --yes --no-check", (machine(env()), machine(env())), file=pairs
    ),
    "own_facts": Case(
        "gnn1 gnn2 --dataset {file} --yes --no-check", (machine(env()), machine(env())), file=facts
    ),
    "own_links": Case(
        "gnn1 gnn2 --dataset {file} --yes --no-check", (machine(env()), machine(env())), file=timed_links
    ),
}  # fmt: skip


def init(monkeypatch: pytest.MonkeyPatch, words: str, *machines: Machine) -> int:
    monkeypatch.setattr(wizard, "connect_all", lambda config: dict(enumerate(machines)))
    monkeypatch.setenv("COLUMNS", "160")
    return main.run(["init", *words.split()])


#: As two others, these have tables, for which a process of the trainer drafts the options.
LONG = ("own_lists", "own_pairs", "own_facts", "own_links")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in CASES]
)
def test_written_files_equal_the_golden_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, golden = CASES[name], GOLDEN / "init" / f"{name}.yml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = case.file(tmp_path) if case.file else ""
    assert init(monkeypatch, case.words.format(file=file), *case.machines) == case.status
    config = load_config(tmp_path / "cluster.yml")
    written = re.sub(r"on \d{4}-\d\d-\d\d,", "on DATE,", (tmp_path / "cluster.yml").read_text())
    written = re.sub(r"Unedited: [0-9a-f]{12}\n", "Unedited: DIGEST\n", written)
    check_text(golden, written)
    assert max(map(len, written.splitlines())) <= 120
    assert len(config.nodes) == sum(not isinstance(one, TransportError) for one in case.machines)


def test_json_contains_the_hosts_and_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(monkeypatch, "gnn1 gnn2 --yes --json", machine(env(), tmux=""), machine(env())) == 3
    printed = json.loads(capsys.readouterr().out)
    assert printed["file"] == "cluster.yml" and [host["host"] for host in printed["hosts"]] == ["gnn1", "gnn2"]
    assert printed["hosts"][0]["environment"] == {"venv": "~/gnnfleet-venv", "versions": VERSIONS}
    assert printed["blocked"] and {"tmux"} == {
        one["check"] for one in printed["findings"] if one["severity"] == "block"
    }


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yml").write_text("mine\n")
    unknown = HostKeyError(
        "host key of gnn1 is not known: ssh-ed25519 SHA256:x",
        host="gnn1",
        remedy="log in once",
        code="host-key-unknown",
    )
    refused = AuthError("no key was accepted for ann", host="gnn2", remedy="`ssh-copy-id ann@gnn2`")
    provoked: list[tuple[str, str, tuple[Machine, ...]]] = [
        ("nobody to ask", "", ()),
        ("nobody may be asked", "--yes", ()),
        ("no graph", "gnn1", ()),
        ("a graph that is not here", "gnn1 --dataset ./none.pt", ()),
        ("a file that is there", "gnn1 --yes -o there.yml", ()),
        ("a folder as file", "gnn1 --yes -o .", ()),
        ("no folder for the file", "gnn1 --yes -o none/cluster.yml", ()),
        ("a range that runs backwards", "node[04-01] --yes", ()),
        ("not a host", "me@gnn1:ssh --yes", ()),
        ("an environment of this machine's folders", "gnn1 --yes --venv my/venv", ()),
        ("a shared folder of here", "gnn1 --yes --shared parts", (machine(env()),)),
        ("two environments", "gnn1 --yes --venv ~/a --conda b", ()),
        ("no host can be reached", "gnn1 gnn2 --yes", (unknown, refused)),
        ("keys that are not known", "al@gnn1:2222 gnn2 gnn3 --yes", (unknown, unknown, refused)),
        ("no such template", "--template serverclient", ()),
        ("nor anything like it", "--template x", ()),
    ]
    messages = []
    for how, words, machines in provoked:
        status = init(monkeypatch, words, *machines)
        shown = capsys.readouterr()
        assert status in (2, 3) and sorted(os.listdir(tmp_path)) == ["there.yml"], how
        messages.append(
            (f"{how}: gnnfleet init {words}", f"{shown.out}{shown.err}".strip() + f"\nexit status {status}")
        )
    check_messages("init", messages)
    assert (tmp_path / "there.yml").read_text() == "mine\n"


def test_an_unedited_file_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # If init is run again, e.g. after a host was repaired, it overwrites the file that it wrote, unless the user has
    # edited that file.
    monkeypatch.chdir(tmp_path)
    assert init(monkeypatch, "gnn1 gnn2 --yes", machine(python="/usr/bin/python3", versions=BARE), machine()) == 3
    shown = capsys.readouterr().out
    assert "run `gnnfleet setup --config cluster.yml`, or name another environment in the file" in shown
    assert "No Python with all packages on gnn1, gnn2. To install them: gnnfleet setup --config cluster.yml" in shown
    assert "pip install" not in shown
    assert init(monkeypatch, "gnn1 gnn2 --yes", machine(env()), machine(env())) == 0
    file = tmp_path / "cluster.yml"
    file.write_text(file.read_text().replace("hidden: 128", "hidden: 64"))
    assert init(monkeypatch, "gnn1 gnn2 --yes", machine(env()), machine(env())) == 2
    assert "cluster.yml exists already" in capsys.readouterr().err and "hidden: 64" in file.read_text()


def test_an_excluded_host_is_reported_with_reason_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(monkeypatch, "gnn1 gnn2 --yes --no-check", machine(), GONE) == 3
    shown = capsys.readouterr().out
    assert "left out gnn2: no answer on port 22 within 10 s – is the machine up?" in shown
    assert "To install them: gnnfleet setup --config cluster.yml" in shown


def test_pythons_are_found_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "gnnfleet-venv").symlink_to(sys.prefix)
    for name in ("project/.venv", "broken"):
        (tmp_path / name / "lib/python3.11/site-packages/torch").mkdir(parents=True)
        (tmp_path / name / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        (tmp_path / name / "bin").mkdir()
    (tmp_path / "project/.venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "broken/bin/python").symlink_to(tmp_path / "none")
    conda = tmp_path / "miniforge3/envs/gnn"
    (conda / "conda-meta").mkdir(parents=True)
    (conda / "lib/python3.12/site-packages/torch").mkdir(parents=True)
    (conda / "bin").mkdir()
    (conda / "bin/python").symlink_to(sys.executable)
    request = {"packages": Path(packages.__file__).read_text(), "given": [], "shared": [str(tmp_path / "no")]}
    reply = environments.main(request)
    found = {(one["key"], one["path"]): one["versions"] for one in reply["environments"]}
    expected = {("venv", "~/gnnfleet-venv"), ("venv", "~/project/.venv"), ("conda", "~/miniforge3/envs/gnn")}
    assert expected == {place for place in found if place[1].startswith("~")}
    assert found["venv", "~/gnnfleet-venv"]["torch"] == packages.versions()["torch"] != ""
    assert str(tmp_path) in reply["shares"] and str(tmp_path / "no") not in reply["shares"]


def test_questions_at_a_terminal_lead_to_a_file_that_passes_check(tmp_path: Path) -> None:
    # With empty answers, init writes a config of two local nodes. If the graph does not exist, it asks again.
    with Terminal("init", cwd=tmp_path, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}) as terminal:
        terminal.await_text("Hosts (").type("\n")
        terminal.await_text("Graph (").type("./none.pt\n")
        terminal.await_text("no file or folder ./none.pt").type("\n")
        assert terminal.end() == 0
        assert "Wrote cluster.yml" in terminal.shown and "What to do" not in terminal.shown
    config = load_config(tmp_path / "cluster.yml")
    assert (config.transport, len(config.nodes), config.data.dataset) == ("local", 2, "synthetic")


@pytest.mark.parametrize(
    ("file", "dataset"),
    [
        ("users.csv", "tables"), ("papers/0000.parquet", "tables"), ("papers/year=2020/0000.PARQUET", "tables"),
        ("edge_index.npy", "file"), ("readme.txt", "file"), ("licenses.csv", "tables"),
    ],
)  # fmt: skip
def test_a_folder_with_tables_or_folders_of_tables_is_recognised(tmp_path: Path, file: str, dataset: str) -> None:
    path = tmp_path / "graph" / file
    path.parent.mkdir(parents=True)
    path.touch()
    assert dataset_of(str(tmp_path / "graph")) == (dataset, str(tmp_path / "graph"))


@pytest.mark.parametrize(
    "rows, world, expected",
    [
        (None, 2, (512, 10)),
        (10_000_000, 8, (2048, 10)),
        (2_200, 3, (256, 43)),
        (50, 1, (64, 100)),
        (50, 32, (512, 100)),
    ],
)
def test_few_rows_make_small_batches_and_many_epochs(rows: int | None, world: int, expected: tuple[int, int]) -> None:
    assert pace(rows, world, 256, 10) == expected
