"""Reads what trackers have written, with their own readers where they have one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float]]]  #: (place on the axis, value) of each curve

_BLOCK, _HEAD = 32768, 7  # as in LevelDB's log format: crc, length, type (1 whole, 2 first, 3 middle, 4 last)


def tensorboard_curves(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_text(folder: Path, tag: str) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    last = EventAccumulator(str(folder)).Reload().Tensors(f"{tag}/text_summary")[-1]
    return "\n".join(text.decode() for text in last.tensor_proto.string_val)


def mlflow_run(store: Path, run: str) -> tuple[Any, Curves]:
    """Return a run of a store of files, and its curves. The experiment must have no other run."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(store.absolute().as_uri())
    found = client.get_run(run)
    assert [one.info.run_id for one in client.search_runs([found.info.experiment_id])] == [run]
    history = {name: client.get_metric_history(run, name) for name in found.data.metrics}
    return found, {name: [(one.step, one.value) for one in values] for name, values in history.items()}


def wandb_run(folder: Path) -> tuple[set[str], dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return ids, config, summary and history of all offline runs in a folder, the oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, config, summary, history = set(), {}, {}, []
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        for data in _records(path.read_bytes()[_HEAD:]):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
            elif kind == "config":
                config |= {one.key: json.loads(one.value_json) for one in record.config.update}
            elif kind == "summary":
                summary |= {
                    one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.summary.update
                }
            elif kind == "history":
                history.append(
                    {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
                )
    return ids, config, summary, history


def wandb_curves(history: list[dict[str, Any]]) -> Curves:
    found: Curves = {}
    for row in history:
        axis = next(name for name in ("epoch", "step", "seconds") if name in row)
        for name in row.keys() - {axis}:
            if not name.startswith("_"):
                found.setdefault(name, []).append((row[axis], row[name]))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    at, whole = _HEAD, b""  # positions in the file, whose first block has the file's header
    data = bytes(_HEAD) + data
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind in (1, 4):
            yield whole
            whole = b""
