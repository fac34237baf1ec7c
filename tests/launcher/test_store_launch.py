"""Tests of ``data.store`` in a launch, and of the commands ``partition push`` and ``partition fetch``."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from findings_kit import HEALTHY, VERSIONS
from launcher.cli.main import run
from launcher.config.loader import load_config
from launcher.config.resolve import ResolvedConfig, resolve_run
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import ConfigError, FleetError, SyncError, UsageError
from launcher.files import CODE_ROOT
from launcher.node.store.push_parts import PUSHED
from launcher.plan.files import FETCH_SPEC
from launcher.plan.model import LaunchPlan, PlannedFile, generated
from launcher.plan.partition import PartitionFiles, read_partition_files
from launcher.preflight.check_packages import package_findings
from launcher.preflight.preflight import run_preflight
from launcher.preflight.survey import Survey
from launcher.sync import parts, parts_store
from launcher.sync.parts import ensure_parts_of, held_parts
from launcher.sync.parts_store import made_from, push_parts, stored_parts
from launcher.sync.progress import TransferProgress
from launcher.sync.push import sync
from launcher.sync.store_progress import StoreProgress
from launcher.transport.local import LocalTransport
from plan_kit import cluster, facts_of, plan_of
from plan_kit import parts_folder as planned_parts
from run_kit import make_launch, make_node
from store_kit import X0, flip_byte, parts_in, visible_files
from trainer.partition.work_folder import locked
from waiting import wait_until

QUIET = Console(quiet=True)


def config_of(folder: Path, store: Path, **data: object) -> ResolvedConfig:
    given = {"dataset": "synthetic", "folder": str(folder), "store": f"file://{store}", **data}
    return resolve_run(ClusterConfig(nodes=(NodeConfig("a"), NodeConfig("b")), data=DataConfig(**given)))


@pytest.fixture()
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the partitioner by a function that creates small parts; return the folders for which it was called."""
    folders: list[str] = []

    def ensure(config: ResolvedConfig, console: Console) -> PartitionFiles:
        folders.append(config.data.folder)
        return parts_in(Path(config.data.folder))

    for module in (parts, parts_store):
        monkeypatch.setattr(module, "ensure_parts", ensure)
    return folders


def test_parts_are_made_and_uploaded_once(tmp_path: Path, made: list[str]) -> None:
    store = tmp_path / "store"
    first = ensure_parts_of(config_of(tmp_path / "parts", store), QUIET)
    assert first is not None and first.folder == f"file://{store}"
    assert visible_files(store) == {file.path for file in first.files}
    elsewhere = ensure_parts_of(config_of(tmp_path / "no parts here", store, source=str(tmp_path)), QUIET)
    assert elsewhere is not None and elsewhere.files == first.files
    assert made == [str(tmp_path / "parts")] and not (tmp_path / "no parts here").exists()
    assert ensure_parts_of(config_of(tmp_path / "parts", store), QUIET) == first


def test_nobody_replaces_the_parts_that_a_launch_sends(tmp_path: Path, made: list[str]) -> None:
    # A second launch of the same parts does not wait. The partitioner does, until both have sent them.
    config = config_of(tmp_path / "parts", tmp_path)
    config = replace(config, data=replace(config.data, store=None))
    said = io.StringIO()
    waits, first, second = threading.Event(), ExitStack(), ExitStack()
    with first, second:
        for one, who in ((first, "r1 of al@lab"), (second, "r2 of bo@lab")):
            assert held_parts(config, Console(file=said), who, one) == read_partition_files(tmp_path / "parts")
        maker = threading.Thread(target=_replace_parts, args=(tmp_path / "parts", lambda line: waits.set()))
        maker.start()
        assert waits.wait(30) and maker.is_alive()
        first.close()
        assert maker.is_alive() and (tmp_path / "parts/manifest.json").exists()
        second.close()
        maker.join(30)
    assert not (tmp_path / "parts").exists() and "waiting" not in said.getvalue()
    with ExitStack() as third:
        reader = threading.Thread(target=held_parts, args=(config, Console(file=said, width=300), "r3", third))
        with locked(tmp_path / "parts", print):
            reader.start()
            wait_until(lambda: "waiting for it" in said.getvalue())
            assert f"pid {os.getpid()} makes the parts in" in said.getvalue()
        reader.join(30)
    assert [path.name for path in tmp_path.iterdir()] == ["parts"], "no lock is left"


def _replace_parts(folder: Path, say: Callable[[str], None]) -> None:
    with locked(folder, say):
        shutil.rmtree(folder)


def test_parts_of_another_graph_are_not_used_and_not_replaced(tmp_path: Path, made: list[str]) -> None:
    store = tmp_path / "store"
    ensure_parts_of(config_of(tmp_path / "parts", store), QUIET)
    with pytest.raises(UsageError, match=r"has 2 parts, but the config needs 3; set data.num_parts"):
        ensure_parts_of(config_of(tmp_path / "none", store, num_parts=3), QUIET)
    with pytest.raises(
        UsageError, match=r"were made with other options: nothing in the store, `--option num_nodes=9` in"
    ):
        ensure_parts_of(config_of(tmp_path / "none", store, options={"num_nodes": 9}), QUIET)
    other = parts_in(tmp_path / "other", 60_000)
    push_parts(other, f"file://{store}", {}, [], QUIET, replace_others=True)
    with pytest.raises(
        FleetError, match=r"has other parts than .*/parts on this machine \(2 parts of toy, and 2 parts"
    ):
        ensure_parts_of(config_of(tmp_path / "parts", store), QUIET)
    assert stored_parts(f"file://{store}", {})[0].files == other.files
    (store / PUSHED).write_text('{"made": 7}')
    assert stored_parts(f"file://{store}", {}) == (stored_parts(f"file://{store}", {})[0], [])


def test_without_a_store_and_in_mode_verify_nothing_is_uploaded(tmp_path: Path, made: list[str]) -> None:
    config = config_of(tmp_path / "parts", tmp_path / "store")
    plain = ensure_parts_of(replace(config, data=replace(config.data, store=None)), QUIET)
    assert plain is not None and plain.folder == str(tmp_path / "parts")
    assert ensure_parts_of(replace(config, data=replace(config.data, store=None, mode="verify")), QUIET) is None
    assert not (tmp_path / "store").exists()


def test_what_parts_were_made_from_is_the_same_on_all_machines(tmp_path: Path) -> None:
    one = config_of(tmp_path / "a", tmp_path, dataset="file", source="/here/graph", partition=DataConfig().partition)
    memory = replace(one.data.partition, memory="4GB")
    other = replace(one, data=replace(one.data, source="/there/graph", folder="/b", partition=memory))
    assert made_from(one) == made_from(other)
    assert "--source" not in made_from(one) and "--dataset" in made_from(one)


def test_a_damaged_manifest_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(FleetError, match="manifest.json: not a usable partition manifest"):
        stored_parts(f"file://{tmp_path}", {})


def test_the_plan_lists_what_nodes_fetch(tmp_path: Path) -> None:
    parts = planned_parts(tmp_path, 2)
    data = DataConfig(dataset="synthetic", store="s3://bucket/toy/", store_limit="2 GB", topology="partitioned")
    plan = plan_of(cluster(data=data), manifest=parts, facts=facts_of(2))
    fetched = [file for file in plan.nodes[1].files if file.url]
    assert {file.url for file in fetched} == {f"s3://bucket/toy/{file.path}" for file in parts.of_parts([1])}
    assert not any(file.source or file.content for file in fetched) and all(file.sha256 for file in fetched)
    (spec,) = (file for file in plan.nodes[1].files if file.dest.endswith(f"/{FETCH_SPEC}"))
    assert '"url": "s3://bucket/toy"' in spec.content and '"limit": 2000000000' in spec.content and spec.mode == 0o600


def stored_plan(top: Path) -> LaunchPlan:
    """Return the plan of one local node that fetches part 0 from ``top/store``."""
    parts = parts_in(top / "store")
    url, node = f"file://{top}/store", make_node(top, 0, [])
    node = replace(node, code_dir=str(CODE_ROOT), start=replace(node.start, env={"PYTHONPATH": str(CODE_ROOT)}))
    wanted = parts.of_parts([0])
    spec = {"url": url, "options": {}, "folder": node.data_dir, "run_dir": node.run_dir, "limit": None}
    spec["files"] = [[file.path, file.bytes, file.sha256] for file in wanted]
    files = [
        PlannedFile(f"{node.data_dir}/{file.path}", file.bytes, sha256=file.sha256, url=f"{url}/{file.path}")
        for file in wanted
    ]
    files.append(generated(f"{node.run_dir}/{FETCH_SPEC}", json.dumps(spec)))
    return make_launch([replace(node, files=tuple(files))])


def test_a_node_fetches_its_parts_itself(tmp_path: Path) -> None:
    plan = stored_plan(tmp_path)
    total = sum(file.bytes for file in plan.nodes[0].files if file.url)
    report = sync(plan, {0: LocalTransport(0)})
    assert (report.bytes_sent, report.bytes_fetched, report.bytes_present) == (0, total, 0)
    assert visible_files(tmp_path / "node0/data") == {
        file.url[len(f"file://{tmp_path}/store/") :] for file in plan.nodes[0].files if file.url
    }
    again = sync(plan, {0: LocalTransport(0)})
    assert (again.bytes_fetched, again.bytes_present) == (0, total)


def test_a_wrong_byte_in_the_store_ends_the_launch_and_names_the_node(tmp_path: Path) -> None:
    plan = stored_plan(tmp_path)
    flip_byte(tmp_path / "store" / X0)
    with pytest.raises(
        SyncError, match=rf"node0 \(local\): file://.*/store/{X0}: digest .* expected .* in two transfers"
    ):
        sync(plan, {0: LocalTransport(0)})
    assert X0 not in visible_files(tmp_path / "node0/data")


def test_a_program_that_ends_without_a_result(tmp_path: Path) -> None:
    script = tmp_path / "cut.py"
    script.write_text('print(\'welcome\'); print(\'{"kind": "bytes", "bytes": 5}\')')
    node = make_node(tmp_path, 0, [])
    program = replace(node.start, argv=(node.start.argv[0], str(script)))
    reader = StoreProgress(0, TransferProgress())
    with pytest.raises(SyncError, match=r"cut.py ended with status 0 and without a result"):
        reader.follow(LocalTransport(), program, threading.Event())
    assert reader.bytes == 5


def test_push_and_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, url = parts_in(tmp_path / "parts"), f"file://{tmp_path}/store"
    assert run(["partition", "push", str(tmp_path / "parts"), url]) == 0
    assert run(["partition", "push", str(tmp_path / "parts"), url]) == 0
    assert "has these parts already" in capsys.readouterr().out
    assert run(["partition", "fetch", url, str(tmp_path / "one"), "--part", "1"]) == 0
    assert visible_files(tmp_path / "one") == {file.path for file in parts.of_parts([1])}
    parts_in(tmp_path / "other", 60_000)
    for words, text in (
        (["push", str(tmp_path / "other"), url], "has the parts of another partition (2 of toy)"),
        (["push", str(tmp_path / "nothing"), url], "has no manifest.json, so it is not a partition folder"),
        (["push", str(tmp_path / "parts")], "give a partition folder and a URL"),
        (["fetch", f"{url}/nothing", str(tmp_path / "two")], "has no manifest.json, so it contains no parts"),
        (["fetch", url, str(tmp_path / "two"), "--part", "2"], "there is no part 2; the parts are 0 to 1"),
        (["fetch", url, str(tmp_path / "other")], "has the parts of another partition; choose another folder"),
        (["fetch", url, str(tmp_path / "two"), "--store-option", "x"], "is not NAME=VALUE"),
    ):
        assert run(["partition", *words]) == 2
        assert text in capsys.readouterr().err
    for manifest in (None, "{", "{}"):  # --force also replaces damaged ones
        if manifest is not None:
            (tmp_path / "store/manifest.json").write_text(manifest)
            assert run(["partition", "push", str(tmp_path / "other"), url]) == 1
            assert "partition push --config FILE --force" in capsys.readouterr().err
        assert run(["partition", "push", str(tmp_path / "other"), url, "--force"]) == 0
    assert stored_parts(url, {})[0].files[-1].sha256 != parts.files[-1].sha256


@pytest.mark.parametrize("what", ["push", "fetch"])
@pytest.mark.parametrize(
    ("url", "option", "message"),
    [
        ("file:///s", "secret=hush", "--store-option secret: not one of the options"),
        ("file:///s", "client_kwargs={aws_secret_access_key: hush}", "--store-option client_kwargs.aws_secret_access"),
        ("file:///s", "endpoint_url=http://u:hush@minio", "--store-option endpoint_url: a URL with a password"),
        ("s3://key:hush@bucket/x", "anon=true", "the URL of the store has a password or a query"),
        ("https://h/x?token=hush", "anon=true", "the URL of the store has a password or a query"),
    ],
)
def test_credentials_on_a_command_line_are_refused(
    what: str, url: str, option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts_in(tmp_path / "parts")
    paths = (str(tmp_path / "parts"), url) if what == "push" else (url, str(tmp_path / "new"))
    assert run(["partition", what, *paths, "--store-option", option]) == 2
    said = capsys.readouterr().err
    assert message in said and "hush" not in said


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("store: bucket/x", "data.store: expected the URL of a folder (s3://bucket/products), found `bucket/x`"),
        ("store: 's3://b/x', mode: verify", "nodes read their parts in place"),
        *(
            (f"store: 's3://b/x', store_options: {options}", f"data.store_options.{name}: {complaint}")
            for options, name, complaint in (
                ("{secret: hush}", "secret", "not one of the options that are known to hold no secret"),
                ("{endpoint_url: 'u:hush@minio:9000'}", "endpoint_url", "a URL with a password"),
                ("{client_kwargs: {aws_secret_access_key: hush}}", "client_kwargs.aws_secret_access_key", "not one of"),
                (
                    "{client_kwargs: {endpoint_url: 'http://u:hush@minio'}}",
                    "client_kwargs.endpoint_url",
                    "a URL with a",
                ),
                ("{endpoint_url: 'https://a/?sig=hush'}", "endpoint_url", "a URL with a password or a query"),
                ("{config_kwargs: {retries: [{Password: hush}]}}", "config_kwargs.retries.Password", "not one of"),
                ("{accountKey: hush}", "accountKey", "not one of the options"),
            )
        ),
        *(
            (f"store: '{url}'", "data.store: a URL with a password or a query")
            for url in (
                "s3://key:hush@bucket/x",
                "s3://key:hu/sh@bucket/x",
                "s3://key%3Ahush@bucket/x",
                "https://h/x?token=hush",
                "simplecache::s3://key:hush@bucket/x",
            )
        ),
        ("store: 's3://b/x', store_limit: 10%", "data.store_limit: expected a size (500GB), found '10%'"),
        ("store: 's3://b/x', serving: products", "the parts are those of the serving cluster"),
    ],
)
def test_mistakes_in_the_config(tmp_path: Path, data: str, message: str) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text(f"nodes: [a, b]\ndata: {{dataset: synthetic, {data}}}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert message in str(raised.value)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [
        "store: 's3://bucket/x', store_options: {client_kwargs: {endpoint_url: 'http://minio:9000'}, anon: true}",
        "store: 'abfs://container@account.dfs.core.windows.net/x', store_options: {account_name: a}",
        "store: 'sftp://me@host:2222/x'",
        "store: 'file:///data/a:b@c'",
    ],
)
def test_stores_without_credentials_are_accepted(tmp_path: Path, data: str) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text(f"nodes: [a, b]\ndata: {{dataset: synthetic, {data}}}\n")
    assert load_config(path).data.store is not None


@pytest.mark.parametrize(
    ("url", "severity", "message"),
    [
        ("file:///nowhere/toy", "ok", "file:///nowhere/toy can be read"),
        ("foo://bucket/toy", "block", "foo://bucket/toy cannot be opened (ValueError: Protocol not known: foo)"),
    ],
)
def test_preflight_reads_the_store_on_the_nodes(tmp_path: Path, url: str, severity: str, message: str) -> None:
    nodes = (NodeConfig("localhost", workdir=str(tmp_path), python=sys.executable),)
    config = ClusterConfig(nodes=nodes, transport="local", data=DataConfig(dataset="synthetic", store=url))
    report = run_preflight(resolve_run(config), {0: LocalTransport(0)})
    (found,) = (one for one in report.findings if one.check == "store")
    assert (found.severity, found.message.split(";")[0]) == (severity, message)


@pytest.mark.parametrize("own_command", [False, True])
def test_a_missing_package_blocks_the_nodes_that_fetch(own_command: bool) -> None:
    nodes = (NodeConfig("a", role="server"), NodeConfig("b", role="client"))
    config = resolve_run(ClusterConfig(nodes=nodes, data=DataConfig(dataset="synthetic", store="s3://b/x")))
    versions = VERSIONS | {"fsspec": "2026.9.0"}
    probes = {k: HEALTHY | {"python": "/v/bin/python", "versions": versions} for k in (0, 1)}
    found = [one for one in package_findings(Survey(config, probes, {}, own_command)) if one.severity != "ok"]
    assert [(one.node_rank, one.severity, one.message) for one in found] == [
        (0, "block", "s3fs not installed for /v/bin/python")
    ]
    assert "pip install s3fs" in found[0].command
