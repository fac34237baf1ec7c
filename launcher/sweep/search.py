"""What the next trial of a sweep tries: the combinations of a grid in their order, or what Optuna asks for."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import UsageError
from launcher.sweep.records import Definition, Trial
from launcher.sweep.space import Choices, combinations

if TYPE_CHECKING:
    from optuna.trial import Trial as Asked

_STATES = {"done": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}


class Grid:
    """Every combination of the values, in their order."""

    def __init__(self, definition: Definition):
        self.definition = definition

    def ask(self, number: int) -> dict[str, str]:
        """Return the values of trial ``number``."""
        return next(islice(combinations(self.definition.space), number, None))

    def prunes(self, trial: Trial, better: str) -> bool:
        """Whether the trial should end after the last epoch in its ``scores``."""
        return False

    def tell(self, trial: Trial, better: str) -> None:
        """Take how a trial has ended."""


class OptunaSearch(Grid):
    """Values and pruning by Optuna, whose storage is a file.

    The study is maximised: scores of which less is better are stored as their negative, since only the first run says
    which is better. Each draw depends on the seed, the trial's number and what is known of the others, so that a sweep
    that was killed goes on with other draws than those that it has made.
    """

    def __init__(self, definition: Definition, storage: Path, epochs: int):
        super().__init__(definition)
        optuna = require_optuna()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners: dict[str, Any] = {
            "none": optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
            "hyperband": optuna.pruners.HyperbandPruner(min_resource=1, max_resource=max(1, epochs)),
        }
        backend = optuna.storages.journal.JournalFileBackend(str(storage))
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend), study_name=definition.name, direction="maximize",
            pruner=pruners[definition.pruner], load_if_exists=True,
        )  # fmt: skip

    def ask(self, number: int) -> dict[str, str]:
        optuna = require_optuna()
        if len(self._study.trials) <= number:
            if self.definition.search == "grid":
                self._study.enqueue_trial(super().ask(number))
            self._study.ask()
        kind = optuna.samplers.TPESampler if self.definition.search == "tpe" else optuna.samplers.RandomSampler
        self._study.sampler = kind(seed=(self.definition.seed * 1_000_003 + number) % 2**32)
        asked, values = self._asked(number), {}
        for one in self.definition.space:  # what was suggested before a sweep was killed is returned again
            if isinstance(one, Choices):
                values[one.key] = str(asked.suggest_categorical(one.key, one.texts))
            elif one.whole:
                values[one.key] = str(asked.suggest_int(one.key, int(one.low), int(one.high), log=one.log))
            else:
                values[one.key] = f"{asked.suggest_float(one.key, one.low, one.high, log=one.log):.6g}"
        return values

    def prunes(self, trial: Trial, better: str) -> bool:
        epoch = max(trial.scores)
        asked = self._asked(trial.number)
        if self._study.trials[trial.number].state.is_finished():
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an epoch that an earlier attempt has reported
            asked.report(_signed(trial.scores[epoch], better), epoch)
        return bool(asked.should_prune())

    def tell(self, trial: Trial, better: str) -> None:
        state = getattr(require_optuna().trial.TrialState, _STATES[trial.state])
        value = _signed(trial.score, better) if trial.state == "done" and trial.score is not None else None
        if trial.state == "done" and value is None:
            state = require_optuna().trial.TrialState.FAIL
        self._study.tell(trial.number, value, state=state, skip_if_finished=True)

    def _asked(self, number: int) -> Asked:
        return require_optuna().trial.Trial(self._study, self._study.trials[number]._trial_id)


def _signed(score: float, better: str) -> float:
    return -score if better == "less" else score


def require_optuna() -> Any:
    """Return the package optuna. Raises UsageError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UsageError(
            "this search needs Optuna: pip install 'gnnfleet[sweep]'; a grid (--search grid, --pruner none) does not"
        ) from None
    return optuna
