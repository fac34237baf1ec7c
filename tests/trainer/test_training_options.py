"""Tests of early stopping, optimizers, schedules and losses: equal on any number of processes, killed and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.optim import lr_scheduler

from kill_kit import killed_run
from train_kit import curve, infer_words, job, metrics, run_ranks, write_parts
from trainer.cli import cli
from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.ranks import Ranks
from trainer.core.train_config import EarlyStop, Schedule
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train
from trainer.train.schedule import rate_share, why_ended
from trainer.train.settings import InferJob, TrainSettings
from trainer.train.tasks.task import Metric


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts", 2)


# The end before the last epoch


@pytest.mark.parametrize(
    "values,stop,ends",
    [
        ([0.5, 0.6, 0.6, 0.6], EarlyStop(2), True),
        ([0.5, 0.6, 0.5, 0.61], EarlyStop(2), False),
        ([0.5, 0.6, 0.61, 0.62], EarlyStop(2, min_delta=0.05), True),
        ([0.5, 0.54, 0.56, 0.58], EarlyStop(2, min_delta=0.05), False),
        ([0.5, 0.4, 0.3, 0.2], EarlyStop(2, "loss"), False),
        ([], EarlyStop(1), False),
        ([float("nan"), 0.5, 0.6, 0.7], EarlyStop(2), False),
        ([float("nan")] * 3, EarlyStop(2), True),
    ],
)
def test_a_run_ends_after_as_many_evaluations_without_improvement(
    values: list[float], stop: EarlyStop, ends: bool
) -> None:  # fmt: skip
    scores = [{"epoch": k, "accuracy": value, "loss": value} for k, value in enumerate(values, 1)]
    assert bool(why_ended(scores, stop, Metric("accuracy", "higher"))) == ends


@pytest.mark.slow
def test_a_patience_ends_a_run_at_the_same_epoch_on_any_number_of_processes_and_after_a_kill(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted: dict[str, Any] = {"epochs": 40, "early_stop": 3, "lr": 0.02, "checkpoint_seconds": 60.0}
    alone = train(job(parts, tmp_path / "alone", **wanted), Ranks())
    assert 4 < alone.epochs < 40 and alone.epochs == alone.best_epoch + 3
    assert alone.ended_early.startswith("val accuracy has not improved on 0.")
    assert alone.ended_early.endswith(f"of epoch {alone.best_epoch} in 3 evaluations")
    assert f"ended early after epoch {alone.epochs} of 40: {alone.ended_early}" in capsys.readouterr().out

    # Killed within the last epoch but one, when the run has waited already.
    last = 2 * (alone.epochs - 2) + 1  # the kit counts two of the three steps of an epoch
    newest = killed_run(job(parts, tmp_path / "killed", **wanted), 2, 1, last)
    together = job(parts, tmp_path / "together", **wanted)
    for ended in run_ranks(3, together, job(parts, tmp_path / "resumed", **wanted, resume=str(newest))):
        assert ended.returncode == 0, ended.output
    for name in ("together", "resumed"):
        (result,) = metrics(tmp_path / name, "result")
        assert (result["epochs"], result["ended_early"]) == (alone.epochs, alone.ended_early), name
    assert curve(tmp_path / "together") == pytest.approx(curve(tmp_path / "alone"), rel=1e-4)

    # A resume says why nothing is left, and goes on with more patience.
    more = {**wanted, "resume": str(tmp_path / "alone" / "checkpoints" / "last.pt")}
    assert train(job(parts, tmp_path / "again", **more), Ranks()).checkpoint is None
    assert (
        f"nothing to train: the checkpoint is at epoch {alone.epochs} of 40, and {alone.ended_early}; increase the "
        "patience of --early-stop to train further"
    ) in capsys.readouterr().out
    longer = train(job(parts, tmp_path / "longer", **{**more, "early_stop": {"patience": 5}}), Ranks())
    assert longer.epochs >= alone.epochs + 2


# Settings of the optimisation


def assert_equal_on_any_number_of_processes(parts: Path, folder: Path, **wanted: Any) -> list[float]:
    """Train alone, on three processes, and on two that are killed and resumed as three. Return the losses of steps."""
    train(job(parts, folder / "alone", **wanted), Ranks())
    newest = killed_run(job(parts, folder / "killed", **wanted), 2, 1, 4)
    saved = load_checkpoint(newest)
    both = [job(parts, folder / "together", **wanted), job(parts, folder / "resumed", **wanted, resume=str(newest))]
    for ended in run_ranks(3, *both):
        assert ended.returncode == 0, ended.output
    whole = curve(folder / "alone")
    assert curve(folder / "together") == pytest.approx(whole, rel=1e-4)
    assert curve(folder / "resumed") == pytest.approx(whole[3 * saved.epoch :], rel=1e-4)
    return whole


@pytest.mark.slow
def test_an_optimizer_with_clipped_gradients_of_a_weighted_and_smoothed_loss(parts: Path, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"epochs": 3, "lr": 0.1, "optimizer": {"name": "SGD", "momentum": 0.9, "nesterov": True}}
    wanted |= {"class_weights": "balanced", "label_smoothing": 0.1}
    clipped = assert_equal_on_any_number_of_processes(parts, tmp_path, **wanted, clip=0.1)
    for name, other in {"free": {}, "unweighted": {"class_weights": None}, "sharp": {"label_smoothing": 0.0}}.items():
        train(job(parts, tmp_path / name, **{**wanted, "epochs": 1, **other}), Ranks())
        assert (curve(tmp_path / name)[0] == clipped[0]) == (name == "free") and curve(tmp_path / name)[1] != clipped[1]


@pytest.mark.slow
def test_metrics_chosen_by_name(parts: Path, tmp_path: Path) -> None:
    names = ("macro_f1", "roc_auc", "average_precision", "micro_f1", "accuracy")
    wanted: dict[str, Any] = {
        "epochs": 6,
        "lr": 0.02,
        "metrics": names,
        "early_stop": {"patience": 2, "metric": "loss"},
        "class_weights": (3.0, 0.5, 1.0, 2.0),
    }
    assert_equal_on_any_number_of_processes(parts, tmp_path, **wanted)
    evals = metrics(tmp_path / "alone", "eval")
    assert [*evals[0]][-1 - len(names) : -1] == [*names] and evals[0]["metric"] == "macro_f1"
    assert all(0.5 < line["roc_auc"] < 1 and 0 < line["average_precision"] < 1 for line in evals[1:])
    assert all(line["micro_f1"] == line["accuracy"] for line in evals)
    for ours, theirs in zip(metrics(tmp_path / "together", "eval"), evals, strict=True):
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, abs=1e-4)
    (result,) = metrics(tmp_path / "alone", "result")
    best = max((line for line in evals if line["split"] == "val"), key=lambda line: line["macro_f1"])
    assert result["best_epoch"] == best["epoch"] and result["val_roc_auc"] == best["roc_auc"]
    assert "baseline_test_macro_f1" in result and "baseline_test_roc_auc" not in result

    # The predictions are scored by the same metrics, and a resumed run may choose others.
    words = infer_words(InferJob(tmp_path / "alone" / "checkpoints" / "last.pt", parts, tmp_path / "out"))
    assert CliRunner().invoke(cli, words).exit_code == 0
    found = json.loads((tmp_path / "out" / "infer.json").read_text())["metrics"]["test"]
    assert [*found] == [*names] and found == pytest.approx({name: result[f"test_{name}"] for name in names}, abs=0.15)
    last = str(tmp_path / "alone" / "checkpoints" / "last.pt")
    others = {**wanted, "epochs": 8, "metrics": ("accuracy",), "early_stop": {"patience": 9, "metric": "micro_f1"}}
    other = train(job(parts, tmp_path / "others", **others, resume=last), Ranks())
    assert other.best_epoch > 0 and other.val is not None and [*other.val] == ["accuracy", "micro_f1"]


STEPS, EPOCHS = 5, 8
SCHEDULERS: dict[str, tuple[Schedule, Callable[[Any], Any], bool]] = {
    "constant": (Schedule("constant"), lambda of: lr_scheduler.ConstantLR(of, 1.0), True),
    "cosine": (Schedule("cosine", lowest=0.1), lambda of: lr_scheduler.CosineAnnealingLR(of, 40, 0.1), True),
    "cosine after a warm-up": (
        Schedule("cosine", warmup_epochs=2),
        lambda of: lr_scheduler.SequentialLR(
            of, [lr_scheduler.LinearLR(of, 0.1, 1.0, 9), lr_scheduler.CosineAnnealingLR(of, 30)], [10]
        ),
        True,
    ),
    "a shorter cosine": (Schedule("cosine", epochs=6), lambda of: lr_scheduler.CosineAnnealingLR(of, 30), True),
    "step": (Schedule("step", every=3, factor=0.5), lambda of: lr_scheduler.StepLR(of, 3, 0.5), False),
    "one-cycle": (
        Schedule("one-cycle", rise=0.25),
        lambda of: lr_scheduler.OneCycleLR(of, 1.0, 40, pct_start=0.25, cycle_momentum=False, final_div_factor=1e20),
        True,
    ),
    "plateau": (
        Schedule("plateau", factor=0.5, patience=2, metric="loss"),
        lambda of: lr_scheduler.ReduceLROnPlateau(of, factor=0.5, patience=1, threshold=0.0),
        False,
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rates_are_those_of_torch_s_schedulers(name: str) -> None:
    schedule, made, by_step = SCHEDULERS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, scores = made(optimizer), list[dict[str, float]]()
    for epoch, loss in enumerate([3.0, 2.0, 2.5, 2.0, 2.0, 1.0, 1.5, 1.6]):
        for step in range(epoch * STEPS, (epoch + 1) * STEPS):
            if name == "a shorter cosine" and step > 30:
                optimizer.param_groups[0]["lr"] = 0.0  # torch's rises again
            share = rate_share(schedule, step, STEPS, EPOCHS, scores, Metric("accuracy", "higher"))
            assert share == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-9), step
            optimizer.step()
            if by_step:
                scheduler.step()
        scores.append({"epoch": epoch + 1, "loss": loss})
        if not by_step:
            scheduler.step(loss) if name == "plateau" else scheduler.step()


@pytest.mark.parametrize(
    "schedule,model",
    [
        (Schedule("cosine", warmup_steps=4, epochs=5), "rgcn"),
        pytest.param(Schedule("plateau", patience=1, factor=0.5, metric="loss"), "sage", marks=pytest.mark.slow),
    ],
    ids=["cosine", "plateau"],
)
def test_a_schedule_of_weights_and_trainable_rows(schedule: Schedule, model: str, parts: Path, tmp_path: Path) -> None:
    if model == "rgcn":
        parts = write_parts(tmp_path / "parts", 2, "synthetic-hetero")
    wanted: dict[str, Any] = {"epochs": 5, "lr": 0.05, "model": model, "schedule": schedule}
    assert_equal_on_any_number_of_processes(parts, tmp_path, **wanted)
    rates = [[line["lr"] for line in metrics(tmp_path / name, "epoch")] for name in ("alone", "together", "resumed")]
    assert len(set(rates[0])) > 1 and rates[1] == rates[0] and rates[2] == rates[0][-len(rates[2]) :]


@pytest.mark.slow
@pytest.mark.parametrize("model,more", [("gat", {"attention_dropout": 0.4, "output_heads": 1}), ("gcn", {})])
def test_dropout_of_features_and_attention(model: str, more: dict[str, Any], parts: Path, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"epochs": 3, "model": model, "activation": "elu", "input_dropout": 0.4, **more}
    assert_equal_on_any_number_of_processes(parts, tmp_path, **wanted)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"early_stop": {"patience": 3, "metric": "mae"}}, "task classification has no metric 'mae'; it has accuracy"),
        ({"metrics": ("accuracy", "f1")}, "metrics: no metric 'f1'; the metrics are accuracy, macro_f1,"),
        ({"label_smoothing": 0.1, "task": "regression"}, "label_smoothing: is for task classification, not regression"),
        ({"schedule": "plateau", "eval_every": 0}, "schedule: needs evaluations on val, but eval_every is 0"),
        ({"attention_dropout": 0.5}, "attention_dropout: model sage does not read it; use gat"),
        ({"lr": float("inf")}, "lr is inf; it must be finite"),
        ({"schedule": "cosin"}, "schedule.name is 'cosin': Invalid enum value 'cosin'; there are constant"),
        ({"schedule": {"warmup_steps": 3}}, "schedule: its name is missing"),
        ({"start": {"checkpoint": "x", "modules": "a"}}, "start.modules is 'a': Expected `array`"),
        ({"early_stop": 3, "eval_every": 0}, "early_stop: needs evaluations on val, but eval_every is 0"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_task_are_refused(
    settings: dict[str, Any], message: str, parts: Path, tmp_path: Path
) -> None:  # fmt: skip
    with pytest.raises(SettingsError, match=message.replace(".", r"\.")):
        train(job(parts, tmp_path, **settings), Ranks())


@pytest.mark.parametrize(
    "value,message",
    [
        ({}, "early_stop: its patience is missing"),
        ({"patience": 3, "metrik": "loss"}, "early_stop has no key 'metrik'; its keys are patience, metric, min_delta"),
        ("soon", "early_stop.patience is 'soon': Expected `int`, got `str`"),
        (0, "early_stop.patience is 0; it must be at least 1"),
    ],
)
def test_keys_of_a_setting_are_checked(value: Any, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        TrainSettings(early_stop=value)
    assert str(error.value) == message


# The weights of another run


def test_a_run_starts_from_the_weights_of_another(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    first = train(job(parts, tmp_path / "first", epochs=4, lr=0.02), Ranks())
    last = tmp_path / "first" / "checkpoints" / "last.pt"
    best = load_checkpoint(last).best
    assert best is not None and best.epoch == first.best_epoch
    tiny: dict[str, Any] = {"lr": 1e-12, "seed": 7}  # the weights stay as they are
    capsys.readouterr()
    again = train(job(parts, tmp_path / "again", **tiny, start=str(last)), Ranks())
    assert f"starting from {len(best.model)} tensors of {last} (epoch {best.epoch})" in capsys.readouterr().out
    assert again.val is not None and again.val == pytest.approx(first.val, abs=0.05)
    (ended,) = run_ranks(1, job(parts, tmp_path / "alone", start=str(last)))[:1]
    assert ended.returncode == 0, ended.output
    assert all(one.returncode == 0 for one in run_ranks(3, job(parts, tmp_path / "together", start=str(last))))
    assert curve(tmp_path / "together") == pytest.approx(curve(tmp_path / "alone"), rel=1e-4)

    # Some modules of a model with another output.
    wider: dict[str, Any] = {**tiny, "fanouts": (5, 5, 5)}
    modules = sorted({".".join(name.split(".")[:2]) for name in best.model})
    some = {"checkpoint": str(last), "modules": modules[:1]}
    train(job(parts, tmp_path / "some", **wider, start=some), Ranks())
    weights = load_checkpoint(tmp_path / "some" / "checkpoints" / "last.pt").model
    same = {name: torch.equal(weights[name].round(decimals=5), of.round(decimals=5)) for name, of in best.model.items()}
    taken = [name for name, equal in same.items() if equal]
    assert taken == [name for name in best.model if name.startswith(f"{modules[0]}.")]
    for start, message in (
        (str(last), f"start: the weights of .*last.pt do not fit the model: {modules[-1]}.* in the checkpoint"),
        ({"checkpoint": str(last), "modules": ["head"]}, "start: the checkpoint has no module 'head'; it has "),
        (str(tmp_path / "gone.pt"), "gone.pt cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(job(parts, tmp_path / "wrong", **wider, start=start), Ranks())


def test_trainable_rows_are_taken_from_another_run(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", 2, "synthetic-hetero")
    wanted: dict[str, Any] = {"model": "rgcn"}
    train(job(parts, tmp_path / "first", **wanted, lr=0.05), Ranks())
    last = tmp_path / "first" / "checkpoints" / "last.pt"
    best, tiny = load_checkpoint(last).best, {**wanted, "lr": 1e-12, "seed": 7}
    assert best is not None and best.embedding
    rows = job(parts, tmp_path / "rows", **tiny, start={"checkpoint": str(last), "modules": ["embedding"]})
    for ended in run_ranks(2, job(parts, tmp_path / "all", **tiny, start=str(last)), rows):
        assert ended.returncode == 0, ended.output
    for name in ("all", "rows"):
        found = load_checkpoint(tmp_path / name / "checkpoints" / "last.pt").best
        assert found is not None and found.embedding is not None
        torch.testing.assert_close(dict(found.embedding), dict(best.embedding))
        equal = all(torch.allclose(found.model[key], value, atol=1e-6) for key, value in best.model.items())
        assert equal == (name == "all")
