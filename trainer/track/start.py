"""Starts the trackers of a run without a supervisor: ``python -m trainer train --track …``, also under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.core.files import write_whole
from trainer.track.follow import FOLDER, PATIENCE, read_object


@contextmanager
def tracked(run_dir: Path, trackers: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
    """In the ``with`` block, send the metrics of the run in ``run_dir`` to trackers, from a process of its own.

    trackers: options of each tracker by its name. config: settings of the run. At the end the process gets ``PATIENCE``
    seconds.
    """
    folder, began = run_dir / FOLDER, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "end.json").unlink(missing_ok=True)
    # A name that no other run has, as trackers continue a run of the same name. Exported scripts have RUN/node0.
    name, above = run_dir.resolve().name, run_dir.resolve().parent.name
    fresh = above if re.fullmatch(r"node\d+", name) else f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    known = read_object(folder / "job.json").get("run_id")  # resumed in its folder
    run_id = os.environ.get("GNNFLEET_RUN_ID") or known or fresh
    job = {"run_id": run_id, "trackers": trackers, "config": config}
    write_whole(folder / "job.json", json.dumps(job), mode=0o600)
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "track", str(run_dir.absolute())], stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2], start_new_session=True,
    )  # fmt: skip
    state, reason = "failed", ""
    try:
        yield
        state = "done"
    except BaseException as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise
    finally:
        report = {"seconds": round(time.monotonic() - began, 1), "reason": reason}
        with suppress(OSError):
            write_whole(folder / "end.json", json.dumps({"state": state, "report": report}))
        try:
            process.wait(PATIENCE + 5)
        except subprocess.TimeoutExpired:
            process.kill()
