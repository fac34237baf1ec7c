"""Tests of ``report.html``: its content, the escaping of hostile texts, and its display in Chromium without network."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import run
from launcher.manage.watch_report import RenderedReport, ReportServer
from launcher.report.html.record import read_record
from launcher.report.html.render import figure, render, write_html
from launcher.report.html.sections import report_page
from launcher.report.metrics import POINTS, Curves
from launcher.report.outcome import Outcome
from operate_kit import LocalRun

HOSTILE = "</script><script>document.title='owned'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
KINDS = ("sample", "remote", "gather", "copy", "forward", "backward", "reduce", "optimizer", "other")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
T = 1_790_000_000.0


def epoch_line(rank: int, epoch: int, **more: Any) -> dict[str, Any]:
    spent = dict.fromkeys(KINDS, 0.01)
    traffic = {"batches": 3, "remote_bytes": 900, "rows": 40, "remote_rows": 20, "cached_rows": 5, "held_rows": 5}
    host = {"remote_bytes": 900, "remote_rows": 20, "cached_rows": 5, "held_rows": 5}
    line = {
        "t": T + epoch,
        "kind": "epoch",
        "rank": rank,
        "epoch": epoch,
        "loss": 1 / epoch,
        "seeds": 30,
        "seconds": 1.0,
    }
    line |= {"seeds_per_s": 30.0, "step_s": 0.09, "spent": spent, "behind": dict.fromkeys(KINDS[:3], 0.01)}
    return line | {"traffic": traffic, "by_host": {str(1 - rank): host}, **more}


def outcome(rank: int, **more: Any) -> dict[str, Any]:
    values = {"name": f"rank{rank}", "node_rank": rank, "host": "local", "rank": rank, "returncode": 0, "signal": None}
    values |= {"started": T + 1, "ended": T + 5, "failed": False, "stopped": False, "oom": False, "note": ""}
    return Outcome(**{**values, "traceback": (), "tail": (), **more}).to_json()


def made_run(top: Path, run_id: str, epochs: range, *, state: str = "done", **launch: Any) -> Path:
    folder = LocalRun(top, run_id).launched("end", started=T, **launch).folder
    for rank in (0, 1):
        lines = [epoch_line(rank, e, **({"step_loss": [1.0, 0.9, 0.8]} if rank == 0 else {})) for e in epochs]
        lines += [{"t": T + e, "kind": "eval", "rank": 0, "epoch": e, "split": "val", "accuracy": 0.5} for e in epochs]
        file = folder / f"logs/node{rank}/metrics-rank{rank}.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = outcome(
        1, returncode=1, failed=True, traceback=("Traceback (most recent call last):", f"ValueError: {HOSTILE}")
    )
    failed = state == "failed"
    (folder / "logs/node1/rank1.log").write_text(f"before it fell: {HOSTILE}\n")
    ends = [outcome(0, stopped=failed), first if failed else outcome(1)]
    nodes = [{"node_rank": k, "host": "local", "outcomes": [one]} for k, one in enumerate(ends)]
    result = {"run_id": run_id, "state": state, "exit_status": 0, "seconds": 5.0, "nodes": nodes, "findings": []}
    result |= {"first_failure": first if failed else None, "metrics": {"test_accuracy": 0.75}, "notes": []}
    (folder / "result.json").write_text(json.dumps(result))
    events = [{"t": T, "kind": "stage", "stage": "connect"}, {"t": T + 1, "kind": "stage", "stage": "train"}]
    events += [{"t": T + 2, "kind": "versions", "nodes": [0, 1], "versions": {"torch": "2.13.0", "cuda": ""}}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*events, "cut"])[:-3])
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def charts(folder: Path) -> dict[str, dict[str, Any]]:
    return {chart.key: figure(chart) for chart in report_page(read_record(folder)).charts}


def test_good_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run(tmp_path, "good", range(1, 4))
    assert run(["report", "good"]) == 0
    file = Path(capsys.readouterr().out.strip())
    text = file.read_text()
    assert file.resolve() == folder / "report.html"
    assert (file.stat().st_mode & 0o777) == 0o600
    assert all(words in text for words in ("test accuracy", "0.7500", "2.13.0", "node0/rank0", "good"))
    drawn = charts(folder)
    assert {"loss", "metric", "speed", "spent", "bytes", "hits", "timeline"} == set(drawn)
    assert [trace["y"][-1] for trace in drawn["loss"]["data"]] == [0.8, 0.333333]
    assert drawn["bytes"]["data"][0]["z"] == [[None, 2700.0], [2700.0, None]]
    assert drawn["hits"]["data"][0]["z"] == [[None, 0.5], [0.5, None]]


def test_a_report_shows_no_credentials(tmp_path: Path) -> None:
    words = ["nodes.*.env.A=hush", "nodes.0.env={A: hush}", "defaults={env: {A: hush}}", "run.notify=[https://hush]"]
    argv = (
        "launch",
        *(word for one in words for word in ("--set", one)),
        "--set=run.notify=hush",
        "--set",
        "train.lr=1",
    )
    folder = made_run(tmp_path, "told", range(1, 2), argv=argv)
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["nodes"][0]["env"], config["run"]["notify"] = {"A": "hush"}, ["https://hooks/hush"]
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    text = render(report_page(read_record(folder)))
    assert "hush" not in text and "train.lr=1" in text and "nodes.*.env.A=***" in text


def test_a_run_on_gpus_has_a_table_of_their_use(tmp_path: Path) -> None:
    folder = made_run(tmp_path, "gpus", range(1, 4))
    assert "device time of a step" not in render(report_page(read_record(folder)))
    device = {"used_bytes": 12e9, "total_bytes": 80e9, "peak_bytes": 9e9, "step_s": 0.1, "utilization": 0.5}
    lines = [epoch_line(1, 1, device={**device, "step_s": 9.0})]  # the first epoch compiles
    lines += [epoch_line(1, epoch, device={**device, "utilization": 0.2 * epoch}) for epoch in (2, 3)]
    file = folder / "logs/node1/metrics-rank1.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = render(report_page(read_record(folder)))
    cells = re.sub(r"(<[^>]*>|\s)+", " ", text)
    assert "node1/rank1 100 ms 50% 9.0 of 80 GB 12.0/80 GB" in cells


def test_a_run_with_a_nan_loss_is_not_good(tmp_path: Path) -> None:
    folder = made_run(tmp_path, "nan", range(1, 4))
    nan = {"t": T + 2, "kind": "nan", "node_rank": 1, "rank": 1, "text": "the loss of rank 1 on node1 (b) is NaN"}
    finding = {**nan, "epoch": 2, "step": 17, "stop": False}
    for name in ("result.json", "events.jsonl"):  # once it has ended, and while it runs
        file = folder / name
        if name == "result.json":
            file.write_text(json.dumps({**json.loads(file.read_text()), "findings": [finding]}))
        else:
            (folder / "result.json").unlink()
            file.write_text(json.dumps({"t": T, "kind": "finding", "node_rank": 1, "finding": finding}) + "\n")
        page = report_page(read_record(folder))
        assert page.headline == nan["text"]
        facts = {fact.label: (fact.value, fact.tone) for fact in page.facts}
        assert facts["state"][1] == "bad"
        assert facts["loss"] == ("NaN loss of rank 1 in epoch 2 at step 17", "bad")


def test_time_without_a_step_is_what_the_supervisors_report(tmp_path: Path) -> None:
    # during a long evaluation metrics lines are old, though the ranks make progress
    folder = made_run(tmp_path, "slow", range(1, 4))
    (folder / "result.json").unlink()
    for idle, expected in ((0.0, None), (90.0, ("90 s", "warn"))):
        page = report_page(read_record(folder, idle=idle))
        facts = {fact.label: (fact.value, fact.tone) for fact in page.facts}
        assert page.state == "running" and facts.get("no step for") == expected and "last step" not in facts


def test_failed_run_starts_with_its_cause_and_escapes_hostile_texts(tmp_path: Path) -> None:
    page = report_page(read_record(made_run(tmp_path, "bad", range(1, 2), state="failed")))
    text = render(page)
    assert page.sections[0].title == "First failure"
    assert "before it fell" in text
    assert "rank 1 on node1 (local) raised ValueError" in page.headline
    assert HOSTILE not in text
    assert text.count("<script") == 3  # chart data, library and program
    assert "<img" not in text


def test_resumed_run_shows_where_it_resumed_and_the_earlier_curve(tmp_path: Path) -> None:
    first = made_run(tmp_path, "first", range(1, 4))
    folder = made_run(tmp_path, "second", range(3, 6), resumed_from="first")
    page, loss = report_page(read_record(folder)), charts(folder)["loss"]
    assert page.headline == "resumed from first after epoch 2"
    assert loss["data"][0]["name"] == "earlier run"
    assert max(loss["data"][0]["x"]) == 2.0
    assert loss["layout"]["shapes"][0]["x0"] == 2.0
    (first / "launch.json").write_text("[")  # a damaged run must not prevent the report of a later one
    assert charts(folder)["loss"]["data"][0]["name"] == "each step"


@pytest.mark.parametrize("left", ["launch.json", "launch.json config.yml", "launch.json result.json"])
def test_an_incomplete_folder_has_a_report(tmp_path: Path, left: str) -> None:
    folder = made_run(tmp_path, "little", range(1, 2))
    for path in [*folder.iterdir()]:
        if path.name not in left.split():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "little" in write_html(folder).read_text()


def test_long_curves_are_thinned_and_bad_lines_are_ignored() -> None:
    step = {"kind": "step", "rank": 0, "epoch": 1, "steps": 9**5, "loss": 1.0, "seeds_per_s": 2}
    steps = [{**step, "t": T + i, "step": i} for i in range(20 * POINTS)]
    bad: list[dict[str, Any]] = [{"kind": "step"}, {"kind": "epoch", "rank": 0, "loss": float("nan"), "epoch": "x"}]
    curves = Curves()
    for line in [*steps, *bad, {"kind": "eval", "accuracy": None}]:
        curves.add(line)
    series = curves.series()
    assert 2 <= len(series.step_loss) <= POINTS
    assert 2 <= len(series.speed[0]) <= POINTS
    assert series.epoch_loss == ()


def test_live_report_requires_the_secret_address_on_this_machine(tmp_path: Path) -> None:
    page = report_page(read_record(made_run(tmp_path, "live", range(1, 3))))
    server = ReportServer(RenderedReport.of(page))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    top = server.url.removesuffix(f"{server.secret}/")
    try:
        assert b"live" in urllib.request.urlopen(server.url).read()
        news = json.load(urllib.request.urlopen(f"{server.url}news?known=older"))
        assert [each["key"] for each in news["figures"]] == [chart.key for chart in page.charts]
        assert urllib.request.urlopen(f"{server.url}news?known={news['version']}").status == 204
        for request in (top, urllib.request.Request(server.url, headers={"Host": "elsewhere.example"})):
            with pytest.raises(urllib.error.HTTPError, match="40[34]"):
                urllib.request.urlopen(request)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_draws_all_charts_without_errors_or_requests(tmp_path: Path) -> None:
    folder = made_run(tmp_path, "bad", range(1, 4), state="failed")
    file, net = write_html(folder), tmp_path / "net.json"
    words = f"""{CHROMIUM} --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
        --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=20000
        --user-data-dir={tmp_path}/profile --log-net-log={net} --dump-dom file://{file}""".split()
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    page = report_page(read_record(folder))
    assert f'data-drawn="{len(page.charts)}"' in done.stdout
    assert done.stdout.count('class="main-svg"') >= len(page.charts)
    assert "data-problem" not in done.stdout
    assert "<title>bad: failed</title>" in done.stdout
    assert "CONSOLE" not in done.stderr
    assert str(file) in net.read_text()  # the network log works
    assert not re.findall(r'"url":"https?://127[^"]*"', net.read_text())


def step_lines(rank: int) -> list[dict[str, Any]]:
    # ranks 0 and 1 log steps 0, 3, 6 and 9 of each epoch, ranks 2 and 3 steps 1, 4, 7 and 10
    step = {"kind": "step", "rank": rank, "steps": 10, "seeds_per_s": 5.0, "seeds": 4}
    at = [(epoch, i) for epoch in (1, 2) for i in range(0, 10, 3)]
    return [{**step, "t": T + 9 * epoch + i, "epoch": epoch, "step": i + rank // 2, "loss": 2.0 + rank % 2}
            for epoch, i in at]  # fmt: skip


def test_an_own_script_of_several_ranks_has_one_smooth_loss_curve(tmp_path: Path) -> None:
    folder = made_run(tmp_path, "own", range(0), own_command=("python", "own.py"))
    for rank in (0, 1, 2, 3):
        file = folder / f"logs/node{rank % 2}/metrics-rank{rank}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in step_lines(rank)))
    (loss,) = charts(folder)["loss"]["data"]
    assert set(loss["y"]) == {2.5} and loss["x"] == sorted(set(loss["x"])) and len(loss["x"]) == 8
    text = render(report_page(read_record(folder)))
    assert "there are no curves" not in text and "so far" not in text and "logs steps but no epochs" in text


def test_the_manifest_is_shown_only_if_unchanged_since_the_launch(tmp_path: Path) -> None:
    folder = made_run(tmp_path, "parts", range(1, 2))
    manifest, kept = tmp_path / "parts" / "manifest.json", json.loads((folder / "run.json").read_text())
    manifest.parent.mkdir(exist_ok=True)
    manifest.write_text('{"num_parts": 2}')
    assert read_record(folder).manifest is None, "no manifest was sent"
    kept["plan"]["manifest"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (folder / "run.json").write_text(json.dumps(kept))
    assert read_record(folder).manifest == {"num_parts": 2}
    manifest.write_text('{"num_parts": 3}')
    assert read_record(folder).manifest is None, "the manifest has changed since"
