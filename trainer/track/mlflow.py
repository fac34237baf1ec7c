"""Sends a run to an MLflow tracking server, or writes it into a store of files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# From version 3.11 on MLflow refuses its store of files, which needs neither a server nor a database, without this.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
# By default the client tries for a quarter of an hour before it fails; a tracker that fails is tried again anyway.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param, RunTag  # noqa: E402

from trainer.track.tracker import Job, Place, Point, flat, title_of  # noqa: E402

FOLDER = "mlruns"  #: store of files that is used if there is no server

_METRICS, _PARAMS = 1000, 100  # at most in one request to a server

_LONGEST = 500  # characters of a parameter that every version of a server accepts

_STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Mlflow:
    """A ``Tracker`` that opens one run; MLflow chooses its id.

    Server and credentials are those of MLflow's variables (MLFLOW_TRACKING_URI, …); option ``uri`` replaces the first.
    """

    def __init__(self, job: Job, options: Mapping[str, Any], known: str) -> None:
        uri = options.get("uri") or os.environ.get("MLFLOW_TRACKING_URI") or (job.folder / FOLDER).absolute().as_uri()
        name = options.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "gnnfleet"
        self._client = MlflowClient(uri)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        at = urlsplit(uri)
        local = at.scheme in ("", "file") and Path(at.path).is_relative_to(job.folder.absolute())
        tags = {"gnnfleet.run_id": job.run_id, "gnnfleet.runs": ", ".join([*job.before, job.run_id])}
        if not known:  # after a restart on another node
            same = self._client.search_runs([number], f"tags.`gnnfleet.run_id` = '{job.run_id}'", max_results=1)
            known = same[0].info.run_id if same else ""
        if known:
            self._id = known
            self._client.update_run(known, status="RUNNING")
        else:
            self._id = self._client.create_run(number, run_name=job.run_id, tags=tags).info.run_id
            if local:  # a store is read only with the folder of files, and no file is copied of an empty folder
                self._client.log_dict(self._id, dict(job.config), "config.json")
        # A parameter never changes: that of a resumed run stays, and a tag has the new value.
        there = self._client.get_run(self._id).data.params
        config = {key: str(value)[:_LONGEST] for key, value in flat(job.config).items()}
        changed = {f"gnnfleet.changed.{key}": text for key, text in config.items() if there.get(key, text) != text}
        new = [Param(key, text) for key, text in config.items() if key not in there]
        for i in range(0, len(new), _PARAMS):
            self._client.log_batch(self._id, params=new[i : i + _PARAMS])
        self._client.log_batch(self._id, tags=[RunTag(key, text) for key, text in {**tags, **changed}.items()])
        page = ""
        if at.scheme in ("http", "https"):  # without credentials that ``uri`` may have
            host = f"{at.hostname}:{at.port}" if at.port else str(at.hostname)
            page = f"{at.scheme}://{host}{at.path.rstrip('/')}/#/experiments/{number}/runs/{self._id}"
        self.place = Place(self._id, page, FOLDER if local else "")

    def log(self, points: Sequence[Point]) -> None:
        metrics = [
            Metric(key, value, round(1000 * point.t), point.at)
            for point in points
            for key, value in point.values.items()
        ]
        for i in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[i : i + _METRICS])

    def end(self, state: str, summary: Mapping[str, Any]) -> None:
        now, known = round(1000 * time.time()), flat(summary)
        numbers = [
            Metric(f"report/{key}", value, now, 0) for key, value in known.items() if type(value) in (int, float)
        ]
        tags = {"gnnfleet.state": state, "mlflow.note.content": title_of({"state": state, **summary})}
        self._client.log_batch(self._id, metrics=numbers, tags=[RunTag(key, text) for key, text in tags.items()])
        self._client.set_terminated(self._id, _STATES[state])
