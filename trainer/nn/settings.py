"""What builders of models are told."""

from __future__ import annotations

from typing import Protocol

import torch

from trainer.nn.precision import PRECISIONS


class ModelSettings(Protocol):
    """What a model needs of the settings; ``TrainSettings`` has it."""

    @property
    def model(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def fanouts(self) -> tuple[int, ...]: ...
    @property
    def seed(self) -> int: ...
    @property
    def precision(self) -> str: ...


def precision_of(settings: ModelSettings) -> torch.dtype:
    """Of dense products."""
    return PRECISIONS[settings.precision]
