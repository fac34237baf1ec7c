"""Where the trackers of a run (``train.track``) show it, from the files that the lead node has written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.node.json_reader import record_in
from launcher.node.json_records import TRACKED

Tracked = Mapping[str, str]  #: ``tracker``, ``id``, ``url`` ('' without a page), ``path`` (of files; '' without)


def tracked_runs(folder: Path) -> list[Tracked]:
    """Return where each tracker shows the run in ``folder``; [] if it has none."""
    found: list[Tracked] = []
    for path in sorted((folder / "track").glob("*.json")):
        state = record_in(TRACKED, str(path))
        if state and state["id"]:
            files = str(folder / "track" / state["folder"]) if state["folder"] else ""
            found.append({"tracker": path.stem, "id": state["id"], "url": state["url"], "path": files})
    return found


def tracked_words(run: Tracked) -> str:
    """Return a tracker's run in one line: ``mlflow: run 3fa2, http://mlflow:5000/#/…``."""
    place = run["url"] or run["path"]
    if run["tracker"] == "wandb" and not run["url"]:  # a resumed run has several folders
        place = f"offline; to upload it: wandb sync --id {run['id']} {Path(place).parent}/offline-run-*"
    return f"{run['tracker']}: run {run['id']}, {place}"
