"""Runs soak scenarios on hosts in network namespaces, and checks the contracts (contracts.py) after each."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from pathlib import Path

from contracts import Verdict, check_failure, check_hosts, check_restarts, check_views, gnnfleet, left, wait_until_clean
from fault_kit import FaultyRun, pythons_of
from launching import Launched, Running
from netns import Host, Machine, NetCluster
from netns_tools import no_memory_limits, state
from operator_kit import end_processes
from scenario import HOSTS, KINDS, LAUNCHES, PEER_TIMEOUT, Scenario
from soak_config import cluster_file, job_words
from soak_curves import Undisturbed, curve_of, epochs_begun
from ssh_nodes import WORKDIR

CLEAN_WITHIN = 60.0  # seconds within which all processes of a stopped run must end, also on a busy machine
PATIENCE = 60.0  # further seconds after a time limit, until the run counts as hanging
LONGEST_CURVE = 60  # epochs; curves of longer runs are not compared, because the undisturbed run takes too long


def kinds_here() -> tuple[str, ...]:
    return KINDS if not no_memory_limits() else tuple(kind for kind in KINDS if kind != "memory")


class Soak:
    def __init__(self, cluster: NetCluster, folder: Path, *, keep: bool = False):
        self.cluster, self.folder, self.keep = cluster, folder, keep
        self.pythons = pythons_of(cluster)
        self.undisturbed = Undisturbed(folder)
        self.serial = 0

    @staticmethod
    def machines() -> dict[int, Machine]:
        limits = not no_memory_limits()
        return {k: Machine(own_memory=limits) for k in range(HOSTS)}

    @property
    def environment(self) -> dict[str, str]:
        return self.cluster.environment(XDG_STATE_HOME=str(self.folder / "state"))

    def run(self, scenario: Scenario) -> Verdict:
        self.serial += 1
        folder = self.folder / f"s{scenario.seed}-{self.serial}"
        parts = folder / "parts" if scenario.fault.kind == "twice" else self.folder / "parts"  # made by these launches
        run = FaultyRun(self.cluster, folder, scenario, self.pythons, parts, self.environment)
        verdict = Verdict(scenario)
        try:
            run.prepare()
            self._run(run, verdict)
        except Exception as error:  # after any error, the soak continues with the next scenario
            verdict.break_("ended", f"{type(error).__name__}: {str(error)[-3000:]}\n{traceback.format_exc(limit=-3)}")
        finally:
            self._restart_dead()
            if verdict.wrong:
                end_processes(self.cluster)
            run.repair()
            run.undo()
        if not verdict.wrong and not self.keep:
            shutil.rmtree(folder)
        for host in self.cluster.hosts:
            host.run(["bash", "-c", f"rm -rf {WORKDIR}/runs/*"])
        return verdict

    def _restart_dead(self) -> None:
        for host in self.cluster.hosts:
            if host.init_pid and state(host.init_pid) in ("", "Z"):
                host.destroy()
                host.power_on()
                host.wait_until_up()

    def _run(self, run: FaultyRun, verdict: Verdict) -> None:
        running = run.launch()
        try:
            if run.scenario.fault.kind in LAUNCHES:
                launches = {"none": self._undisturbed, "damaged": self._damaged, "twice": self._twice}
                end = launches[run.scenario.fault.kind](run, running, verdict)
            else:
                run.await_moment(running)
                run.inject(running)
                follow = self._survived if run.scenario.survives else self._failed
                end = follow(run, running, verdict)
        finally:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
        check_hosts(verdict, self.cluster.hosts)
        check_views(verdict, run, end)
        if end == "done" or (end == "stopped" and run.scenario.resume):
            self._check_curve(run, run.run_dir, verdict)
        if run.scenario.resume and not verdict.wrong:
            self._resume(run, verdict)

    # --- how a run ends -----------------------------------------------------------------------

    def _undisturbed(self, run: FaultyRun, running: Running, verdict: Verdict) -> str:
        done = running.end()
        began = time.monotonic()
        if run.scenario.detached:
            while left(self.cluster.hosts) and time.monotonic() < began + PATIENCE:
                time.sleep(0.5)
            done = self._collect(run)
        self._check_clean(run, verdict, time.monotonic(), CLEAN_WITHIN)
        verdict.status, verdict.reported = done.status, "done"
        if done.status:
            verdict.break_("status", f"exit status {done.status} of a run without faults: {done.output[-1500:]}")
        return "done"

    def _damaged(self, run: FaultyRun, running: Running, verdict: Verdict) -> str:
        self._undisturbed(run, running, verdict)
        run.inject(running)
        refused = run.launch("-refused").end()
        path = run.run_dir.with_name(f"{run.run_id}-refused") / "result.json"
        first = (json.loads(path.read_text()) if path.is_file() else {}).get("first_failure") or {}
        named = "x.npy does not have the sha256" in refused.output and first.get("node_rank") == run.scenario.fault.node
        if refused.status != 1 or not named:
            verdict.break_("repaired", f"with a damaged part: exit status {refused.status}: {refused.output[-1500:]}")
        again = run.launch("-again").end()
        if again.status:
            verdict.break_("repaired", f"after it was found: exit status {again.status}: {again.output[-1500:]}")
        self._check_clean(run, verdict, time.monotonic(), CLEAN_WITHIN)
        self._check_curve(run, run.run_dir.with_name(f"{run.run_id}-again"), verdict)
        return "done"

    def _twice(self, run: FaultyRun, running: Running, verdict: Verdict) -> str:
        other = run.launch("-other").end()
        if other.status:
            verdict.break_("waits", f"exit status {other.status} of the second launch: {other.output[-1500:]}")
        end = self._undisturbed(run, running, verdict)
        self._check_curve(run, run.run_dir.with_name(f"{run.run_id}-other"), verdict)
        return end

    def _failed(self, run: FaultyRun, running: Running, verdict: Verdict) -> str:
        others = [host for k, host in enumerate(self.cluster.hosts) if k != run.unreachable]
        self._check_clean(run, verdict, run.injected, run.scenario.within, others)
        done = None if run.scenario.detached else running.end(PATIENCE)
        run.repair()
        if run.unreachable is not None:
            self._check_clean(run, verdict, time.monotonic(), CLEAN_WITHIN)
        check_failure(verdict, run, done or self._collect(run))
        return "failed"

    def _survived(self, run: FaultyRun, running: Running, verdict: Verdict) -> str:
        epoch, kind = run.epoch(), run.scenario.fault.kind
        if kind in ("blip", "returns"):
            run.repair()
        if kind == "returns":  # until it has ended its own processes and told what it has lost
            self._check_clean(run, verdict, time.monotonic(), CLEAN_WITHIN, [run.host])
            time.sleep(PEER_TIMEOUT)
            epoch = run.epoch()
        try:
            run.await_epoch(epoch + 2)
        except AssertionError as error:
            verdict.break_("survives", f"{error}; {running.output[-2500:]}")
        run.repair()
        began = time.monotonic()
        stopped = gnnfleet(run.environment, "stop", run.run_id)
        verdict.reported = stopped.stdout.splitlines()[-1] if stopped.stdout else ""
        if stopped.returncode:
            verdict.break_("stop", f"exit status {stopped.returncode}: {stopped.stdout + stopped.stderr}")
        self._check_clean(run, verdict, began, CLEAN_WITHIN)
        if run.scenario.detached or kind == "launcher":
            self._collect(run)
        else:
            done = running.end(PATIENCE)
            verdict.status = done.status
            if done.status != 130:
                verdict.break_("status", f"exit status {done.status} of a stopped run: {done.output[-1500:]}")
        if run.scenario.starts_again:
            check_restarts(verdict, run)
        return "stopped"

    def _check_clean(
        self, run: FaultyRun, verdict: Verdict, began: float, within: float, hosts: list[Host] | None = None
    ) -> None:
        found = wait_until_clean(hosts or self.cluster.hosts, within + PATIENCE / 2 - (time.monotonic() - began))
        verdict.ended_after = max(verdict.ended_after, time.monotonic() - began)
        if found:
            verdict.break_("clean", f"left {time.monotonic() - began:.0f} s later: {found}")
        elif time.monotonic() - began > within:
            verdict.break_("clean", f"clean only after {time.monotonic() - began:.1f} s, not {within:g} s")

    def _collect(self, run: FaultyRun) -> Launched:
        done = gnnfleet(run.environment, "collect", run.run_id)
        return Launched(done.returncode, done.stdout + done.stderr, run.folder)

    # --- resume -------------------------------------------------------------------------------

    def _resume(self, run: FaultyRun, verdict: Verdict) -> None:
        if run.unreachable is not None:  # the lines of rank 0 may be on that host only
            self._collect(run)
        epochs = epochs_begun(run.run_dir) + 1
        run_id = f"{run.run_id}r"
        job = job_words(run.scenario, epochs)
        if run.scenario.resume == "more":
            config = cluster_file(
                run.folder, self.cluster, run.scenario, self.pythons, run.parts, epochs=epochs, more=1
            )  # fmt: skip
            checkpoint = run.run_dir / "checkpoints/last.pt"
            words = ["launch", "--config", str(config)]
            words += ["--set", f"train.resume={checkpoint}"] if checkpoint.is_file() else []
        else:
            words = ["resume", run.run_id, "--set", "run.stall_after=auto"]
            if run.scenario.resume == "fewer":
                holders = run.scenario.servers or run.scenario.nodes - 1
                words += ["--exclude", f"node{run.scenario.nodes - 1}"]
                words += ["--set", f"data.replicas={min(run.scenario.replicas, holders)}"]
            if run.scenario.own:
                run.folder.joinpath("job.py").write_text(_with_epochs(run.folder / "job.py", epochs))
                job = []
            else:
                words += ["--epochs", str(epochs)]
        done = gnnfleet(run.environment, *words, "--run-id", run_id, *job, cwd=run.folder, seconds=240)
        if done.returncode:
            verdict.break_("resume", f"{words}: exit status {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
            return
        self._check_clean(run, verdict, time.monotonic(), CLEAN_WITHIN)
        check_hosts(verdict, self.cluster.hosts)
        self._check_curve(run, run.run_dir.with_name(run_id), verdict)

    def _check_curve(self, run: FaultyRun, run_dir: Path, verdict: Verdict) -> None:
        if epochs_begun(run_dir) > LONGEST_CURVE:
            return
        for message in self.undisturbed.differences(run.scenario, curve_of(run_dir)):
            verdict.break_("curve", f"{run_dir.name}: {message}")


def _with_epochs(path: Path, epochs: int) -> str:
    # a resumed run gets the same arguments as the first
    return path.read_text().replace("main(int(sys.argv[1])", f"main({epochs}")
