"""Shared by the trainer's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small steps: on a busy machine threads that wait for each other cost far more than they save."""
    torch.set_num_threads(1)
