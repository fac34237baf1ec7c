"""Tests of how many batches exist at once, which bounds the memory of a loader."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from load_kit import homo_data, parts_of
from trainer.core.ranks import RankGroup, Ranks
from trainer.graph.prefetch import ordered_ahead
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.nn.layers import SAGEConv
from trainer.nn.models import BlockModel
from trainer.train.epoch import evaluate, train_epoch
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.tasks.classification import Classification

ALONE = RankGroup(Ranks(), torch.device("cpu"))


class Result:
    """A result of a job; unlike ``object()``, it can be weakly referenced."""


class Census:
    """Counts the objects that are alive, and the most that were alive at once."""

    def __init__(self):
        self.alive, self.most, self._lock = 0, 0, threading.Lock()

    def enter(self, made):
        with self._lock:
            self.alive += 1
            self.most = max(self.most, self.alive)
        weakref.finalize(made, self._leave)
        return made

    def _leave(self):
        with self._lock:
            self.alive -= 1


@pytest.mark.parametrize(("threads", "ahead", "most"), [(1, 1, 2), (1, 2, 2), (1, 4, 4), (3, 2, 4), (2, 5, 5)])
def test_the_number_of_results_alive_at_once_is_bounded(threads, ahead, most):
    census = Census()
    results = ordered_ahead(lambda _: census.enter(Result()), range(40), threads=threads, ahead=ahead, deadline=60)
    for number in range(40):
        result = next(results)
        until = time.monotonic() + 30
        while number < 10 and census.alive < most:  # the threads work ahead as far as allowed
            assert time.monotonic() < until
            time.sleep(0.001)
        del result
    assert census.most == most and next(results, None) is None
    gc.collect()
    assert census.alive == 0


def test_a_thread_works_while_a_result_is_in_use():
    begun = threading.Semaphore(0)
    results = ordered_ahead(lambda _: begun.release(), range(9), threads=1, ahead=1, deadline=10)
    for _ in range(8):
        next(results)
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60), "the next one was begun"
        begun.release()


class Counted(BatchLoader):
    census: Census

    def load(self, share):
        return self.census.enter(super().load(share))


@pytest.mark.parametrize("does", ["train", "evaluate"])
def test_training_and_evaluation_hold_at_most_two_batches_at_once(does, tmp_path):
    loader = Counted(parts_of(homo_data(), 1), LoaderSettings("train", (3, 2), 4), 0, RankLayout.single(1))
    loader.census = Census()
    width = next(iter(loader.epoch(9))).x.shape[1]
    model, task = BlockModel([SAGEConv(width, 8), SAGEConv(8, 64)], 0.0), Classification(64)
    loader.census = Census()
    assert len(loader) > 4
    if does == "train":
        optimizers = Optimizers(torch.optim.SGD(model.parameters(), 0.1))
        with MetricsLog(tmp_path, 0) as log:
            train_epoch(model, task, optimizers, loader, 1, ALONE, log)
    else:
        evaluate(model, task, loader, ALONE)
    assert loader.census.most <= 2
