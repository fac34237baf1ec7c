"""Builds the sections of a report page from the ``RunRecord`` of a run."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from rich.filesize import decimal

from launcher.report.device_use import device_uses
from launcher.report.events import finding_words, nan_words
from launcher.report.html.charts import (
    all_of,
    bars,
    loss_chart,
    metric_chart,
    pair_chart,
    resumed_at,
    speed_chart,
    spent_chart,
)
from launcher.report.html.page import Block, Fact, Lines, PageSection, ReportPage, Table, Tone, Words
from launcher.report.html.record import RunRecord
from launcher.report.html.timeline import timeline_chart
from launcher.report.metrics import metric_of, number, score_text
from launcher.report.outcome import aftermath_of
from launcher.report.profile import rank_name
from launcher.report.run_folder import tracked_runs
from launcher.report.verdict import from_here
from launcher.text import count, seconds_words, spans


def _traffic_blocks(record: RunRecord) -> Iterator[Block]:
    """Yield heat maps of bytes and of cached rows between pairs of nodes, and a table by rank.

    Nothing if no rank received bytes from other nodes.
    """
    ranks, plan = record.metrics.analysis.traffic, record.found.plan
    if not any(rank.sums["remote_bytes"] for rank in ranks):
        return
    # Remote rows and bytes by (requesting node, answering node), summed over ranks and epochs.
    pairs: dict[tuple[int, int], dict[str, float]] = {}
    for rank in ranks:
        for host, values in rank.by_host.items() if rank.node is not None else ():
            of_pair = pairs.setdefault((rank.node or 0, host), {})
            for name, value in values.items():
                of_pair[name] = of_pair.get(name, 0.0) + value
    if pairs and plan:
        # Heat maps of bytes and of cached rows.
        asking, asked = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
        to = [f"node{i}" for i in asking]
        of = [f"{plan.serving}/node{j}" if plan.serving else f"node{j}" for j in asked]
        sent = [[pairs[i, j]["remote_bytes"] if (i, j) in pairs else None for j in asked] for i in asking]
        yield pair_chart("bytes", "Bytes from other nodes, all epochs", to, of, sent, "bytes")
        shares = {
            pair: (sums["cached_rows"] + sums["held_rows"]) / sums["remote_rows"]
            for pair, sums in pairs.items()
            if sums["remote_rows"]
        }
        if shares:
            hits = [[shares.get((i, j)) for j in asked] for i in asking]
            yield pair_chart("hits", "Share of remote rows that were cached or held, all epochs", to, of, hits, "share")
    rows = tuple(
        (
            rank.name,
            decimal(round(rank.sums["remote_bytes"])),
            _share(rank.sums["remote_rows"], rank.sums["rows"]),
            _share(rank.sums["cached_rows"], rank.sums["remote_rows"]),
            _share(rank.sums["held_rows"], rank.sums["remote_rows"]),
            _share(
                rank.sums["remote_rows"] - rank.sums["cached_rows"] - rank.sums["held_rows"], rank.sums["remote_rows"]
            ),
        )
        for rank in ranks
    )
    columns = ("rank", "#bytes received", "#remote rows", "#of these cached", "#of these held", "#of these requested")
    yield Table(columns, rows, "All epochs")
    if record.metrics.analysis.profile and (predicted := record.metrics.analysis.profile.predicted) is not None:
        yield Words((f"Predicted before the first epoch: {decimal(round(predicted))} per epoch.",))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


_TONES: Mapping[str, Tone] = {"done": "good", "failed": "bad", "stopped": "warn"}


def report_page(record: RunRecord) -> ReportPage:
    """Build the report page of a run, without empty sections."""
    sections = (
        PageSection("cause", "First failure", tuple(_cause(record))),
        PageSection("training", "Training", tuple(_training(record))),
        PageSection("time", "Where the time goes", tuple(_time(record))),
        PageSection("traffic", "Between nodes", tuple(_traffic_blocks(record))),
        PageSection("parts", "Partition", tuple(_parts(record))),
        PageSection("events", "Timeline and events", tuple(_events(record))),
        PageSection("nodes", "Nodes", tuple(_nodes(record))),
        PageSection("config", "Configuration and versions", tuple(_config(record))),
    )
    shown = tuple(section for section in sections if section.blocks)
    return ReportPage(record.found.run_id, record.state, _headline(record), tuple(_facts(record)), shown)


def _headline(record: RunRecord) -> str:
    if record.first is not None:
        return record.first.sentence
    by = record.result.get("stopped_by")
    if record.state == "stopped":
        return f"stopped by {by}" if by else "stopped"
    if record.state == "failed":
        notes = record.result.get("notes") or ["no process reported a cause"]
        return str(notes[0])
    return str(record.nan["text"]) if record.nan else _resumed_words(record)


def _resumed_words(record: RunRecord) -> str:
    launch = record.found.launch
    if launch is None or not launch.resumed_from:
        return ""
    at = resumed_at(record)
    after = f" after epoch {at:.0f}" if at is not None else ""
    here = "" if record.before else " (that run is not on this machine, so its curves are missing)"
    return f"resumed from {launch.resumed_from}{after}{here}"


def _facts(record: RunRecord) -> Iterator[Fact]:
    result, metrics = record.result, record.result.get("metrics") or {}
    nan = record.nan
    yield Fact("state", record.state, "bad" if nan else _TONES.get(record.state, ""))
    if nan:
        yield Fact("loss", nan_words(nan), "bad")
    if record.idle:
        yield Fact("no step for", seconds_words(record.idle), "warn")
    last = {split: points[-1][1] for split, points in record.metrics.series.scores.items() if points}
    metric = metric_of([metrics]) if metrics else record.metrics.series.metric
    for split in ("test", "val"):
        value = metric.of(metrics, split)
        if value is None and metric == record.metrics.series.metric:
            value = last.get(split)
        if value is not None:
            yield Fact(f"{split} {metric.title}", score_text(value))
            beside, _ = metric.baseline(metrics, split)
            if beside:
                yield Fact(f"{split} {metric.title} without a model", beside)
    if record.metrics.series.epoch_loss and not nan:
        yield Fact("loss", score_text(record.metrics.series.epoch_loss[-1][1]))
    if record.metrics.series.epochs_done:
        config = record.found.config
        of = f" of {config.train.epochs}" if config and not record.found.own else ""
        why = metrics.get("ended_early")
        yield Fact("epochs", f"{record.metrics.series.epochs_done}{of}{why and f'; ended early: {why}' or ''}")
    if result:
        yield Fact("seconds", f"{float(result['seconds']):,.1f}")
    if restarts := result.get("restarts"):
        yield Fact("restarts", f"{len(restarts)} ({sum(one['seconds'] for one in restarts):,.1f} s)", "warn")
    if record.found.plan:
        plan = record.found.plan
        yield Fact("on", f"{count(len(plan.nodes), 'node')}, {count(plan.world_size, 'rank')}")
    speeds = [value for each in (metrics.get("seeds_per_s") or {}).values() if (value := number(each)) is not None]
    if speeds:
        yield Fact("seeds/s", f"{sum(speeds):,.0f}")
    for run in tracked_runs(record.folder):
        yield Fact(run["tracker"], f"{run['id']}, {run['url'] or run['path']}")
    if record.started:
        yield Fact("launched", time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started)))


def _cause(record: RunRecord) -> Iterator[Block]:
    first = record.first
    if first is not None:
        aftermath = aftermath_of(first, [one for one in record.outcomes if one != first])
        yield Words((f"{first.sentence}{aftermath.lead}",), "bad")
        if first.last_lines:
            yield Lines("last output", "\n".join(first.last_lines))
        if aftermath.lines:
            yield Words(aftermath.lines)
        if not record.log:
            yield Words((f"{first.log_name} is empty or was not collected.",))
        else:
            yield Lines(f"{first.log_name}, last {count(len(record.log), 'line')}", "\n".join(record.log), folded=True)
    elif record.state in ("failed", "stopped"):
        yield Words((_headline(record),), _TONES[record.state])
    notes = tuple(map(str, record.result.get("notes") or ()))
    if notes:
        yield Words(tuple(f"note: {note}" for note in notes), "warn")
    if record.state in ("failed", "stopped") and (commands := from_here(record.found).next):
        yield Lines("next commands", "\n".join(commands))


def _training(record: RunRecord) -> Iterator[Block]:
    words = _resumed_words(record)
    if words:
        yield Words((words,))
    drawn = list(all_of([loss_chart(record), metric_chart(record), speed_chart(record)]))
    yield from drawn
    if not record.metrics.series.epochs and record.state != "running":
        if not record.found.own:
            what = ": the curves show single steps." if drawn else ", so there are no curves."
            yield Words((f"No epoch was finished{what}",))
        elif drawn:
            text = (
                "The script logs steps but no epochs: a point is the mean over ranks of their latest logged steps, at "
                "most one per second and rank. StepLog.epoch(epoch, loss, val=accuracy) adds epochs and accuracies."
            )
            yield Words((text,))
        else:
            text = "The script logs neither steps nor epochs (see gnnfleet.StepLog), so there are no curves."
            yield Words((text,))


def _time(record: RunRecord) -> Iterator[Block]:
    profile = record.metrics.analysis.profile
    if profile is None:
        return
    epochs = f"{'epoch' if len(profile.epochs) == 1 else 'epochs'} {spans(profile.epochs)}"
    so_far = "" if profile.whole or record.state != "running" else " so far"
    yield spent_chart(profile)
    yield Words((f"Means over {epochs}{so_far}.",))

    # How ranks use their GPUs.
    uses, node_of = device_uses(record.metrics.series.epochs), record.node_of
    if not uses:
        return
    rows = tuple(
        (rank_name(rank, node_of.get(rank)), *(text or "–" for text in (use.step, use.share, use.peak, use.memory)))
        for rank, use in uses.items()
    )
    columns = ("rank", "#device time of a step", "#utilisation", "#peak memory", "#memory of all processes")
    yield Table(columns, rows, "GPUs")


def _parts(record: RunRecord) -> Iterator[Block]:
    manifest, plan = record.manifest, record.found.plan
    if manifest is None:
        if plan and plan.num_parts:
            yield Words((f"{count(plan.num_parts, 'part')}; the partition folder is not on this machine.",))
        return
    try:
        parts = int(manifest["num_parts"])
        nodes, edges, size = [0] * parts, [0] * parts, [0] * parts
        for total, kinds in ((nodes, manifest["nodes"]), (edges, manifest["edges"])):
            for kind in kinds.values():
                for p in range(parts):
                    total[p] += int(kind["offsets"][p + 1]) - int(kind["offsets"][p])
        for file in manifest["files"]:
            top = str(file["path"]).partition("/")[0]
            if top.startswith("part"):
                size[int(top[4:])] += int(file["bytes"])
        rows = tuple((str(p), f"{nodes[p]:,}", f"{edges[p]:,}", decimal(size[p])) for p in range(parts))
        cut, balance = float(manifest["edge_cut"]), float(manifest["balance"])
        by = f"{manifest['dataset']}, cut by {manifest['algorithm']}, seed {manifest['seed']}"
        largest = f"the largest part has {balance:.2f} times the mean number of nodes"
        yield Words((f"{by}: {cut:.1%} of the edges are between parts; {largest}.",))
        if parts > 1:
            names = [f"part {p}" for p in range(parts)]
            yield bars("part-nodes", "Nodes of each part", names, nodes, "nodes")
            yield bars("part-edges", "Edges of each part", names, edges, "edges")
        yield Table(("#part", "#nodes", "#edges", "#on disk"), rows)
    except (KeyError, TypeError, ValueError, IndexError):  # manifest of another version
        yield Words(("The manifest of the parts could not be read.",), "warn")


def _events(record: RunRecord) -> Iterator[Block]:
    yield from all_of([timeline_chart(record)])
    findings = tuple(map(finding_words, record.result.get("findings", ())))
    if findings:
        yield Words(findings, "warn")
    known = ("t", "kind", "node_rank", "name", "pid", "pgid", "rank")
    started, lines = record.started, []
    for event in record.events[-200:]:
        k, name = event.get("node_rank"), event.get("name")
        where = "launcher" if k is None else f"node{k}" + (f"/{name}" if name else "")
        more = {key: value for key, value in event.items() if key not in known and value not in (None, "")}
        rest = ", ".join(f"{key}: {value}" for key, value in more.items())
        what = f"{event.get('kind')}{f'  {rest}' if rest else ''}"
        t = f"+{float(event['t']) - started:.1f} s"
        lines.append(f"{t:>9}  {where:<14} {what}")
    if lines:
        yield Lines(f"last {count(len(lines), 'event')}", "\n".join(lines), folded=True)


def _nodes(record: RunRecord) -> Iterator[Block]:
    plan = record.found.plan
    if plan is None:
        return
    ended = record.state if record.state in ("done", "running") else "stopped"
    rows = tuple(
        (
            str(node.node_rank),
            node.target,
            node.role,
            spans(node.ranks) if node.ranks else "–",
            ", ".join(map(str, node.devices)) or "CPU",
            spans(node.parts) if node.parts else "–",
            "; ".join(one.reason for one in record.outcomes if one.node_rank == node.node_rank and one.failed) or ended,
        )
        for node in plan.nodes
    )
    yield Table(("#node", "host", "role", "ranks", "devices", "parts", "ended"), rows)


def _config(record: RunRecord) -> Iterator[Block]:
    launch = record.found.launch
    if launch is not None:
        settings = [(word, _SECRET_SETTING.fullmatch(word)) for word in launch.argv]
        command = shlex.join(f"{one['key'] or one['section']}***" if one else word for word, one in settings)
        yield Lines("command", f"cd {shlex.quote(launch.cwd)}\n{command}")
    versions = [event for event in record.events if event.get("kind") == "versions"]
    if versions:
        by_nodes = [(spans(sorted(event.get("nodes", ()))), dict(event.get("versions", {}))) for event in versions]
        names = sorted({name for _, found in by_nodes for name in found})
        rows = tuple((name, *(str(found.get(name) or "–") for _, found in by_nodes)) for name in names)
        yield Table(("package", *(f"node {nodes}" for nodes, _ in by_nodes)), rows, "Versions")
    path = record.folder / "config.yml"
    if path.is_file():
        # Values in ``env`` and addresses in ``run.notify`` may be secret, and reports are shared.
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
        except yaml.YAMLError:
            text = ""
        else:
            text = yaml.safe_dump(_masked(tree), sort_keys=False, allow_unicode=True, width=100)
        yield Lines("config of the run", text, folded=True)
    if record.result:
        text = json.dumps(record.result.get("metrics") or {}, indent=1)
        yield Lines("figures (result.json)", text, folded=True)


#: What sets values that ``_masked`` hides, as ``nodes.*.env.TOKEN=x`` and ``defaults={env: {TOKEN: x}}``.
_SECRET_SETTING = re.compile(
    r"(?P<key>(--set=)?((nodes|defaults)[^=]*\.env\b|run\.notify\b)[^=]*=).*"
    r"|(?P<section>(--set=)?(nodes|defaults|run)[^=]*=).*\b(env|notify)[\"']?\s*:.*",
    re.DOTALL,
)


def _masked(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_masked(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: dict.fromkeys(value, "***") if key == "env" and isinstance(value, dict)
        else ["***"] * len(value) if key == "notify" and isinstance(value, list)
        else _masked(value)
        for key, value in tree.items()
    }  # fmt: skip
