"""CUDA streams for threads that make batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StreamPool:
    """Streams on one device, each used by one thread at a time. Thread-safe. Without CUDA, contexts do nothing.

    Threads of later epochs get the same streams again. torch keeps memory that is freed on a stream for later
    allocations on that stream, so with new streams the memory of earlier epochs would not be used again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[Any] = []  #: ``torch.cuda.Stream``
        self._of_thread = threading.local()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Within this context, this thread's work on the device uses a stream of its own. Waits for it at the end.

        A context within another one uses the same stream. Tensors made here may be used on other streams afterwards;
        if they are freed there, ``Tensor.record_stream`` must be called before.
        """
        if self._device.type != "cuda":
            yield
        elif (outer := getattr(self._of_thread, "stream", None)) is not None:
            yield
            outer.synchronize()
        else:
            own = self._of_thread.stream = self._take()
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(own):
                    yield
                    own.synchronize()
            finally:
                self._of_thread.stream = None
                self._free.append(own)

    def _take(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return torch.cuda.Stream(self._device)
