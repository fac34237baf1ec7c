"""Golden test of the sentences of reports about stalls, stragglers and loss values that are not finite."""

from __future__ import annotations

import json
from pathlib import Path

from golden_kit import GOLDEN, check_text
from launcher.node.diagnostics.stacks import STOPPED, folded, summary
from launcher.node.diagnostics.vitals import Vitals
from vitals_kit import LABELS, Cluster, pace


def stalls() -> list[str]:
    started, behind, loading, together, evaluating, script = (Cluster(stall_after=60) for _ in range(6))
    started.all(0, kind="start", epoch=None, at=[1, 0, "load"])
    started.wait(1000)
    for run in (behind, loading, together, evaluating, script):
        run.steps(1, 17, every=4)
    behind.all(18, phase="reduce")
    behind.rank(3, 17, "compute")
    loading.all(18, phase="reduce")
    loading.rank(0, 18, "load")
    loading.rank(1, 18, "load")
    together.all(18, phase="reduce")
    evaluating.all(4, phase="evaluate")
    evaluating.rank(2, 3, "evaluate")
    script.all(18, at=None)
    script.rank(1, 1, kind="epoch", at=None)
    for run in (behind, loading, together, evaluating, script):
        run.wait(100)
    return [run.findings[-1]["text"] for run in (started, behind, loading, together, evaluating, script)]


def stragglers() -> list[str]:
    slow, remote = Cluster(), Cluster()
    pace(slow, 20, own_s=0.41)
    pace(slow, 60)
    pace(remote, 20, own_s=0.41, batch_s=0.3, remote_share=0.83)
    return [finding["text"] for run in (slow, remote) for finding in run.findings]


def non_finite_losses(folder: Path) -> list[str]:
    texts = []
    for number, lines in enumerate(
        (
            [{"kind": "step", "epoch": 2, "step": 16, "loss": 0.69314}, {"kind": "step", "epoch": 2, "step": 17}],
            [{"kind": "epoch", "epoch": 2}],
        )
    ):
        run_dir = folder / str(number)
        run_dir.mkdir()
        (run_dir / "metrics-rank3.jsonl").write_text(
            "".join(json.dumps({"t": 1.0, "loss": float("nan"), **line}) + "\n" for line in lines)
        )
        texts += [finding["text"] for finding in Vitals(str(run_dir), [3], 1, LABELS[1]).look(0.0)]
    return texts


def places() -> list[str]:
    torch = "/env/lib/python3.11/site-packages/torch"
    reducing = [
        "Current thread 0x00007f0000000001 (most recent call first):",
        f'  File "{torch}/distributed/distributed_c10d.py", line 2501 in all_reduce',
        f'  File "{torch}/distributed/c10d_logger.py", line 81 in wrapper',
        '  File "/home/ann/gnnfleet-work/code/c0de/trainer/core/ranks.py", line 105 in sum',
    ]
    loading = ["Current thread 0x01 (most recent call first):", '  File "/home/ann/run/files/data.py", line 17 in load']
    roots = ("/home/ann/gnnfleet-work/code/c0de/", "/home/ann/run/files/")
    stacks = dict.fromkeys(range(8), [summary(reducing, roots)])
    stacks |= {3: [summary(loading, roots)], 6: [STOPPED]}
    return folded(stacks)


def test_sentences_of_findings(tmp_path: Path) -> None:
    text = "".join(f"{line}\n" for line in [*stalls(), *stragglers(), *non_finite_losses(tmp_path), *places()])
    check_text(GOLDEN / "messages_vitals.txt", text)
