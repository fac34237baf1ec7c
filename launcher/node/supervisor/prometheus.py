"""Writes the figures of a node for Prometheus (``run.prometheus``): a file for node_exporter's textfile collector."""

from __future__ import annotations

import glob
import math
import os
import site
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from launcher.node.spec import NodeSpec
from launcher.node.supervisor.journal import LatestWriter
from launcher.node.supervisor.observer import Finding, Observer, Sight

_EVERY = 5.0  # seconds between two files; node_exporter is usually asked every 15 s or more

_LEFT = 120.0  # seconds after which a file that was not renewed is that of a supervisor that was killed

#: Gauges of a rank, by the field of its state (``Vitals.ranks``).
_OF_RANKS = {
    "epoch": ("gnnfleet_epoch", "Number of the epoch, from 1."),
    "step": ("gnnfleet_step", "Number of the step in the epoch, from 0."),
    "steps": ("gnnfleet_steps", "Number of steps in the epoch."),
    "loss": ("gnnfleet_loss", "Loss of the last recorded step, mean over the seeds of the rank."),
    "seeds_per_s": ("gnnfleet_seeds_per_second", "Seeds per second of the rank in this epoch."),
    "step_s": ("gnnfleet_step_seconds", "Seconds per step."),
    "batch_s": ("gnnfleet_batch_wait_seconds", "Seconds per step that the rank waited for its batch."),
    "remote_share": ("gnnfleet_remote_row_ratio", "Share of a batch's rows that other hosts store, 0 to 1."),
    "idle_s": ("gnnfleet_idle_seconds", "Seconds since the last sign of progress."),
}
_OF_DEVICES = {
    "used_bytes": ("gnnfleet_gpu_memory_used_bytes", "Memory in use on the rank's GPU."),
    "total_bytes": ("gnnfleet_gpu_memory_total_bytes", "Memory of the rank's GPU."),
    "utilization": ("gnnfleet_gpu_utilization_ratio", "Share of time in which the rank's GPU computed, 0 to 1."),
}


class PrometheusFile(Observer):
    """The file ``gnnfleet-RUN-node<k>.prom`` in the folder ``spec.prometheus``.

    It is written by a thread, so that a disk that hangs stops nothing, and deleted at the end of the run. Files that
    supervisors have left behind, as they were killed, are deleted by the next one that uses the folder.
    """

    kind = "prometheus"

    def __init__(self, *of_node: Any) -> None:
        super().__init__(*of_node)
        if sys.flags.no_site:
            site.main()  # installed packages, without which supervisors start
        self._next, self._told = 0.0, False
        self._path = os.path.join(
            self.first.prometheus, f"gnnfleet-{self.first.run_id}-node{self.first.node_rank}.prom"
        )
        self._writer = LatestWriter(self._path, before=self._delete_left)

    @staticmethod
    def wanted(spec: NodeSpec) -> bool:
        return bool(spec.prometheus)

    def look(self, sight: Sight) -> list[Finding]:
        """Write the file if it is due. Returns a finding once if it cannot be written."""
        error = self._writer.failed()
        why = f"{self._path} cannot be written: {error.strerror}" if error else ""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            try:
                self._writer.put(self._text(sight.state))
            except ImportError:
                why = "prometheus_client is not installed here: gnnfleet setup, or pip install prometheus_client"
        if not why or self._told:
            return []
        self._told = True
        return [self.finding(why)]

    def close(self) -> list[Finding]:
        self._next = math.inf
        self._writer.settle(1.0)
        with suppress(OSError):  # it was never written, or the disk hangs
            os.unlink(self._path)
        return []

    def _delete_left(self) -> None:
        for path in glob.glob(os.path.join(glob.escape(self.first.prometheus), "gnnfleet-*-node*.prom")):
            with suppress(OSError):  # another user's, or another run deletes it now
                if time.time() - os.stat(path).st_mtime > _LEFT:
                    os.unlink(path)

    def _text(self, state: Mapping[str, Any]) -> str:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()
        run = {"run": self.first.run_id, "node": str(self.first.node_rank)}

        def gauge(name: str, words: str, *labels: str) -> Gauge:
            return Gauge(name, words, [*run, *labels], registry=registry)

        node = gauge("gnnfleet_node_state", "1 for the state of the node (training, serving, …).", "state")
        node.labels(*run.values(), state["state"]).set(1)
        up = gauge("gnnfleet_heartbeat_timestamp_seconds", "When the node's supervisor wrote this file.")
        up.labels(*run.values()).set(state["time"])
        restarts = gauge("gnnfleet_restarts", "Automatic restarts of the run so far.")
        restarts.labels(*run.values()).set(state.get("generation", 0))
        findings = gauge("gnnfleet_findings", "Findings of the node so far, by kind.", "kind")
        for one in state["findings"]:
            findings.labels(*run.values(), one["kind"]).inc()
        for fields, of in ((_OF_RANKS, lambda entry: entry), (_OF_DEVICES, lambda entry: entry.get("device", {}))):
            for field, (name, words) in fields.items():
                values = {rank: of(entry).get(field) for rank, entry in state["ranks"].items()}
                known = {rank: value for rank, value in values.items() if value is not None}
                made = gauge(name, words, "rank") if known else None
                for rank, value in known.items():
                    assert made is not None
                    made.labels(*run.values(), str(rank)).set(value)
        return str(generate_latest(registry).decode())
