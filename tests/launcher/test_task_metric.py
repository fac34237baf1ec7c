"""Tests that reports and comparisons name the metric of a run's task, and whether lower values are better."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.config.loader import to_yaml
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.report.compare import compare, figures_of, rendered
from launcher.report.html.record import read_record
from launcher.report.html.sections import report_page
from launcher.report.launch_file import LaunchFile
from launcher.report.metrics import Metrics, TaskMetric, metric_of, score_text
from launcher.report.report import RunReport, print_report
from launcher.report.run_folder import read_folder
from launcher.report.run_history import entry_of


def made_run(top: Path, run_id: str, errors: tuple[float, ...], **changes: Any) -> Path:
    """Write the folder of a regression run with these mean absolute errors after its epochs."""
    folder = top / "runs" / run_id
    replace(LaunchFile.mine(run_id, "toy", config="cluster.yml").at("end"), started=1.0).write(folder)
    (folder / "config.yml").write_text(to_yaml(ClusterConfig((NodeConfig("a"),), DataConfig("synthetic"))))
    named = {"metric": "mae", "metric_title": "MAE", "better": "lower", **changes}
    ended = {**named, "test_mae": errors[-1], "test_rmse": 2 * errors[-1], "val_mae": min(errors)}
    result = {"run_id": run_id, "state": "done", "seconds": 5.0, "nodes": [], "notes": [], "first_failure": None}
    (folder / "result.json").write_text(json.dumps({**result, "metrics": ended}))
    lines: list[dict[str, Any]] = []
    for epoch, error in enumerate(errors, start=1):
        lines.append({"t": epoch, "kind": "epoch", "rank": 0, "epoch": epoch, "loss": 1 / epoch, "seconds": 1.0})
        more = {**named, "mae": error, "rmse": 2 * error, "loss": 0.1}
        lines.append({"t": epoch + 0.5, "kind": "eval", "rank": 0, "epoch": epoch, "split": "val", **more})
    lines.append({"t": 99.0, "kind": "result", "rank": 0, **ended})
    file = folder / "logs/node0/metrics-rank0.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_comparison_marks_the_lowest_error(tmp_path: Path) -> None:
    folders = [made_run(tmp_path, "a", (0.4, 0.3)), made_run(tmp_path, "b", (0.5, 0.2))]
    comparison = compare([figures_of(read_folder(folder)) for folder in folders])
    rows = {f"{row.section} {row.title}": (row.values, row.best) for row in comparison.rows}
    assert rows["results test MAE"] == ((0.3, 0.2), (1,))
    assert rows["metric 1"] == ((0.4, 0.5), (0,))
    console = Console(file=io.StringIO(), width=100)
    console.print(rendered(comparison))
    assert isinstance(console.file, io.StringIO)
    assert "val MAE by epoch" in console.file.getvalue()


def test_runs_and_the_page_name_the_metric(tmp_path: Path) -> None:
    folder = made_run(tmp_path, "a", (4000.0, 1234.5))
    entry = entry_of(folder)
    assert (entry.metric, entry.test, entry.why) == ("mae", 1234.5, "test MAE 1234.5")
    page = report_page(read_record(folder))
    facts = {fact.label: fact.value for fact in page.facts}
    assert (facts["test MAE"], facts["val MAE"]) == ("1234.5", "1234.5")


@pytest.mark.parametrize(
    ("line", "name", "title", "better"),
    [
        ({}, "accuracy", "accuracy", "more"),
        ({"metric": 5}, "accuracy", "accuracy", "more"),
        ({"metric": "rmse", "metric_title": "RMSE", "better": "lower"}, "rmse", "RMSE", "less"),
        ({"metric": "hits@10", "better": "higher"}, "hits@10", "hits@10", "more"),
        ({"metric": "mrr", "metric_title": 7}, "mrr", "mrr", "more"),
    ],
)
def test_lines_without_a_metric_have_the_accuracy(line: dict[str, Any], name: str, title: str, better: str) -> None:
    found = metric_of([line])
    assert (found.name, found.title, found.better) == (name, title, better)


def test_a_value_that_is_no_finite_number_is_unknown() -> None:
    for value in (None, "good", True, float("nan"), float("inf")):
        assert TaskMetric().of({"test_accuracy": value}, "test") is None
    assert TaskMetric().of({"accuracy": 1}) == 1.0
    assert [score_text(value) for value in (0.12345, 1234.56, 2.5e7)] == ["0.1235", "1234.6", "2.5e+07"]


BESIDE = {
    "kind": "result", "metric": "mrr", "metric_title": "MRR", "better": "higher", "test_mrr": 0.056, "val_mrr": 0.2,
    "baseline": "the targets with most links", "baseline_test_mrr": 0.102, "baseline_val_mrr": 0.1,
}  # fmt: skip


def test_a_result_is_compared_with_its_baseline() -> None:
    metric = metric_of([BESIDE])
    assert metric.baseline(BESIDE, "val") == ("0.1000 (the targets with most links)", False)
    words, worse = metric.baseline(BESIDE, "test")
    assert worse and words.endswith("(the targets with most links); the model is not better than it")
    error = {"metric": "mae", "better": "lower", "test_mae": 3.0, "baseline": "the mean", "baseline_test_mae": 4.0}
    assert metric_of([error]).baseline(error, "test") == ("4.0000 (the mean)", False)
    for other in ({}, {"baseline": 3, "baseline_test_mrr": 1.0}, {"baseline": "x", "baseline_test_mrr": None}):
        assert metric.baseline(other, "test") == ("", False)


def test_the_report_shows_the_baseline_beside_the_result(tmp_path: Path) -> None:
    out = io.StringIO()
    report = RunReport("run-1", tmp_path, state="done", metrics=Metrics((BESIDE,)))
    print_report(report, Console(file=out, width=200))
    assert "test MRR: 0.0560  baseline 0.1020 (the targets with most links); the model is not better than it" in (
        out.getvalue()
    )
