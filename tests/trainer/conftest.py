"""Fixtures shared by the trainer's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    # for small tensors, synchronising threads costs more time than it saves
    torch.set_num_threads(1)
