"""The main job on this machine: launch.py as a process, real tmux, the bundled trainer."""

from __future__ import annotations

import json

import pytest

from launching import launch, local_config


@pytest.fixture(autouse=True)
def private_tmux(tmp_path, monkeypatch):
    """A tmux server of the test's own."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))


def test_two_local_nodes_train_and_give_the_loss_curve_of_one(tmp_path, local_workdirs):
    """One part and process, and two of each: the same losses to 1e-4 relative, because of the same samples."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one = launch(local_config(folders[0], [1], local_workdirs))
    two = launch(local_config(folders[1], [1, 1], local_workdirs, data={"partition": {"method": "metis"}}))
    assert one.status == 0, one.output
    assert two.status == 0, two.output
    assert len(one.step_losses()) == 4
    for epoch in (1, 2):
        assert two.step_losses(epoch) == pytest.approx(one.step_losses(epoch), rel=1e-4)
    assert two.result["state"] == "done"
    assert two.result["metrics"]["test_accuracy"] == pytest.approx(one.result["metrics"]["test_accuracy"], abs=0.02)
    assert f"{two.result['metrics']['test_accuracy']:.3f}"[:4] in two.output
    assert {path.name for path in (two.run_dir / "logs" / "node1").iterdir()} >= {"rank1.log", "supervisor.log"}
    assert (two.run_dir / "checkpoints" / "last.pt").stat().st_size > 0
    assert json.loads((two.run_dir / "plan.json").read_text())["world_size"] == 2
