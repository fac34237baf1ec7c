"""Tests of checkpoints: written atomically, loaded without unpickling code, refused if they do not fit the run."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.node.supervisor.attempt import newest_checkpoint
from trainer.core.errors import CheckpointError
from trainer.store.manifest import EdgeSpec, Manifest, NodeSpec
from trainer.train import checkpoint as module
from trainer.train.checkpoint import (
    BestEpoch,
    Checkpoint,
    PartialEpoch,
    check_fits,
    graph_record,
    load_checkpoint,
    save_checkpoint,
    settings_record,
)
from trainer.train.checkpoint_writer import CheckpointWriter
from trainer.train.settings import TrainSettings

EDGE = ("author", "writes", "paper")
MANIFEST = Manifest(
    dataset="ring", fingerprint="f", num_parts=1, algorithm="random", seed=0, hetero=True,
    nodes={of: NodeSpec(9, (0, 9), {}, {}, 3) for of in ("author", "paper")},
    edges={EDGE: EdgeSpec(20, (0, 20), {}, (), 0.0)}, edge_cut=0.0, balance=1.0, graph_attrs={}, files=(),
)  # fmt: skip
GRAPH = graph_record(MANIFEST, "paper")


def made(epoch: int = 3, best_epoch: int | None = 2, **settings: Any) -> Checkpoint:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    tables = {"author": torch.rand(9, 2)}
    best = None if best_epoch is None else BestEpoch(best_epoch, {"accuracy": 0.75}, model.state_dict(), tables)
    return Checkpoint(
        epoch=epoch,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        settings=settings_record(TrainSettings(**settings)),
        graph=GRAPH,
        task={"kind": "classification", "outputs": 3, "metrics": ["accuracy"]},
        step_loss=tuple(torch.rand(5, dtype=torch.float64) for _ in range(epoch)),
        best=best,
        embedding={"tables": tables, "optimizer_rows": {}, "optimizer_rest": {"step": epoch}},
    )


def test_a_checkpoint_is_loaded_as_saved(tmp_path: Path) -> None:
    saved = made()
    path = save_checkpoint(tmp_path / "checkpoints", saved)
    assert path == tmp_path / "checkpoints" / "epoch-0003.pt"
    for file in (path, path.with_name("last.pt")):
        loaded = load_checkpoint(file)
        assert loaded.epoch == 3 and loaded.settings == saved.settings and loaded.graph == saved.graph
        assert loaded.best is not None and (loaded.best.epoch, loaded.best.metrics) == (2, {"accuracy": 0.75})
        torch.testing.assert_close(dict(loaded.model), dict(saved.model), atol=0, rtol=0)
        torch.testing.assert_close(dict(loaded.best.model), dict(saved.best.model), atol=0, rtol=0)
        torch.testing.assert_close(loaded.best.embedding, saved.best.embedding, atol=0, rtol=0)
        torch.testing.assert_close(loaded.embedding, saved.embedding, atol=0, rtol=0)
        torch.testing.assert_close(loaded.optimizer["state"], saved.optimizer["state"], atol=0, rtol=0)
        assert torch.equal(torch.stack(loaded.step_loss), torch.stack(saved.step_loss))
    assert torch.load(path, weights_only=True)["epoch"] == 3


def test_the_two_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for epoch in range(1, 7):
        save_checkpoint(tmp_path, made(epoch, best_epoch=min(epoch, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-0002.pt", "epoch-0005.pt", "epoch-0006.pt", "last.pt",
    ]  # fmt: skip
    assert load_checkpoint(tmp_path / "last.pt").epoch == 6


@pytest.mark.parametrize("name,kept", [("accuracy", [1, 3, 5, 6]), ("mae", [2, 4, 5, 6])])
def test_as_many_of_the_best_are_kept_as_wanted(name: str, kept: list[int], tmp_path: Path) -> None:
    values = [0.9, 0.1, 0.7, 0.2, math.nan, 0.5]
    scores = [{"epoch": epoch, "loss": 1.0, name: value} for epoch, value in enumerate(values, 1)]
    for epoch in range(1, 7):
        whole = made(epoch, best_epoch=1 if name == "accuracy" else min(epoch, 2))
        task = {**whole.task, "metrics": [name, "loss"]}
        settings = {**whole.settings, "keep": 2}
        save_checkpoint(
            tmp_path, dataclasses.replace(whole, task=task, settings=settings, scores=tuple(scores[:epoch]))
        )
    assert sorted(epoch for epoch, step in dict(module.files_of(tmp_path))) == kept


def test_a_full_disk_leaves_the_old_checkpoint_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, made(1, 1))

    def half(content: Any, file: Any) -> None:
        file.write(b"PK half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(CheckpointError, match="epoch-0002.pt cannot be written: No space left on device"):
        save_checkpoint(tmp_path, made(2, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0001.pt", "last.pt"]
    assert load_checkpoint(tmp_path / "last.pt").epoch == 1


def test_a_process_that_dies_while_writing_leaves_no_partial_file(tmp_path: Path) -> None:
    # A child process exits while it writes its second checkpoint.
    save_checkpoint(tmp_path, made(1, 1))
    child = os.fork()
    if child == 0:
        crash = lambda content, file: (file.write(b"PK half"), file.flush(), os._exit(9))  # noqa: E731
        module.torch.save = crash  # type: ignore[assignment]
        save_checkpoint(tmp_path, made(2, 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["epoch-0001.pt", "last.pt"]
    assert load_checkpoint(tmp_path / "last.pt").epoch == 1


def test_last_is_a_copy_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for epoch in (1, 2):
        save_checkpoint(tmp_path, made(epoch, None))
    assert load_checkpoint(tmp_path / "last.pt").epoch == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0001.pt", "epoch-0002.pt", "last.pt"]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere.pt cannot be read: No such file"):
        load_checkpoint(tmp_path / "nowhere.pt")
    whole = save_checkpoint(tmp_path, made())
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cut.pt is damaged, or not a checkpoint"):
        load_checkpoint(cut)
    with cut.open("wb") as file:
        module._write_with_digest({"epoch": 3}, file)
    with pytest.raises(CheckpointError, match="cut.pt is not a gnnfleet-checkpoint of version 6"):
        load_checkpoint(cut)
    torch.save({"format": module.FORMAT, "version": module.VERSION, "run": os.system}, cut)
    with pytest.raises(CheckpointError, match="cut.pt is damaged, or not a checkpoint"):
        load_checkpoint(cut)


@pytest.mark.parametrize("place", [100, 2000, -300])
def test_a_changed_byte_is_noticed_in_every_copy(place: int, tmp_path: Path) -> None:
    data = bytearray(save_checkpoint(tmp_path, made()).read_bytes())
    data[place] ^= 1
    (tmp_path / "copy.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="copy.pt is damaged, or not a checkpoint"):
        load_checkpoint(tmp_path / "copy.pt")


def test_the_digest_is_the_comment_of_an_archive_that_torch_reads(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, made())
    assert zipfile.ZipFile(path).comment.startswith(b"sha256:") and zipfile.ZipFile(path).testzip() is None
    assert torch.load(path, weights_only=True, mmap=True)["epoch"] == 3


def within(epoch: int, steps: int) -> Checkpoint:
    """Return a checkpoint that was saved ``steps`` steps after the end of epoch ``epoch``."""
    partial = PartialEpoch(torch.rand(steps, dtype=torch.float64), torch.full((steps,), 4))
    return dataclasses.replace(made(epoch, None), partial=partial)


def test_a_checkpoint_within_an_epoch_is_loaded_as_saved(tmp_path: Path) -> None:
    saved = within(3, 120)
    path = save_checkpoint(tmp_path, saved)
    assert path.name == "epoch-0003-step-000120.pt"
    loaded = load_checkpoint(tmp_path / "last.pt")
    assert loaded.position == (3, 120) and loaded.partial is not None and saved.partial is not None
    assert torch.equal(loaded.partial.loss_sums, saved.partial.loss_sums)
    assert torch.equal(loaded.partial.sizes, saved.partial.sizes)


def test_the_newest_files_within_an_epoch_are_kept_until_the_epoch_is_done(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("epoch-*"))

    save_checkpoint(tmp_path, made(1, 1))
    for steps in (10, 20, 30):
        save_checkpoint(tmp_path, within(1, steps))
    assert names() == ["epoch-0001-step-000020.pt", "epoch-0001-step-000030.pt", "epoch-0001.pt"]
    save_checkpoint(tmp_path, made(2, 1))
    assert names() == ["epoch-0001.pt", "epoch-0002.pt"]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, made())
    content = {**module.load_content(path), "version": module.VERSION - 1}
    with path.open("wb") as file:
        module._write_with_digest(content, file)
    with pytest.raises(CheckpointError, match=f"is not a {module.FORMAT} of version {module.VERSION}"):
        load_checkpoint(path)


def test_a_run_whose_samples_were_drawn_in_another_way_cannot_be_resumed() -> None:
    with pytest.raises(CheckpointError, match="the version of the random draws is 2, in the checkpoint 0"):
        check_fits(dataclasses.replace(made(), draws=0), TrainSettings(), GRAPH, "last.pt", "classification")


def test_what_a_killed_process_was_writing_is_deleted(tmp_path: Path) -> None:
    (tmp_path / ".epoch-0002.pt.123.456").write_bytes(b"PK half")
    CheckpointWriter(tmp_path).write(made(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0003.pt", "last.pt"]


def test_a_full_disk_within_an_epoch_is_reported_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.write(made(1, 1))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    for steps in (10, 20):
        writer.begin(within(1, steps))
    writer.finish()
    assert capsys.readouterr().out.count("cannot be written: No space left on device; training continues") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0001.pt", "last.pt"]
    assert load_checkpoint(tmp_path / "last.pt").epoch == 1


def test_every_difference_to_the_run_is_named() -> None:
    saved = made(hidden=64, fanouts=(5, 5), seed=1)
    larger = {**GRAPH, "num_nodes": {"author": 9, "paper": 10}, "target": "author"}
    with pytest.raises(CheckpointError) as refused:
        check_fits(saved, TrainSettings(hidden=32, fanouts=(5, 4)), larger, "last.pt", "regression")
    message = str(refused.value)
    differences = ("hidden is 32, in the checkpoint 64", "fanouts is (5, 4), in the checkpoint (5, 5)")
    for difference in (*differences, "seed is 0, in the checkpoint 1"):
        assert difference in message
    assert "num_nodes is {'author': 9, 'paper': 10}, in the checkpoint {'author': 9, 'paper': 9}" in message
    assert "target is author, in the checkpoint paper" in message and "lr" not in message


def test_settings_that_do_not_change_the_loss_curve_may_differ() -> None:
    other = TrainSettings(epochs=99, eval_every=5, sampler_threads=4, timeout=5.0, resume="last.pt", layers=3)
    recut = graph_record(dataclasses.replace(MANIFEST, num_parts=4, fingerprint="g"), "paper")
    # raises for any difference that changes the loss curve
    check_fits(made(), other, recut, "last.pt", "classification")
    with pytest.raises(CheckpointError, match="belongs to another run: lr is 0.5, in the checkpoint 0.004$"):
        check_fits(made(), dataclasses.replace(other, lr=0.5), recut, "last.pt", "classification")


def test_supervisors_recognise_a_checkpoint(tmp_path: Path) -> None:
    module.save_content(tmp_path / "checkpoints", (3, 7), {"weights": list(range(1000))})
    assert newest_checkpoint(str(tmp_path)) == {"file": "epoch-0003-step-000007.pt", "epoch": 3, "step": 7}
