"""Whether all ranks were given the same seeds: each loader shares them out itself."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from trainer.core.errors import SettingsError

_TRAINER = str(Path(__file__).resolve().parents[1])

_made: Counter[str] = Counter()  #: loaders by the line of the user's code that made them


class SameOnAllRanks:
    """Compares a loader's seeds with those of the same loader on other ranks, once, without waiting for them.

    Loaders are told apart by the line of the user's code that made them, and by how many that line had made.
    """

    def __init__(self, digest: str, rank: int, world_size: int):
        self._digest, self._rank, self._world_size = digest, rank, world_size
        self._place = _place()
        _made[self._place] += 1
        self._name = f"{self._place} #{_made[self._place]}"
        self._done = False

    def check(self) -> None:
        """Raise ``SettingsError`` if another rank has other seeds or settings. Without a process group nothing
        can be compared."""
        if self._done or self._world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() != self._world_size:
            return
        store = dist.distributed_c10d._get_default_store()  # the only way to a rendezvous store that never blocks
        own = f"{self._digest} rank {self._rank}"
        first = store.compare_set(f"gnnfleet/loader/{self._name}", "", own).decode()
        if first.split()[0] != self._digest:
            raise SettingsError(
                f"the loader made at {self._place} has other seeds, times or settings on rank {self._rank} than on"
                f" {first.partition(' ')[2]}. Every rank must pass the same, complete seeds: the loader shares each"
                " batch out over the ranks. Do not split them by rank, and shuffle by shuffle=True."
                " For a loader that is this rank's alone, pass local=True"
            )
        self._done = True


def _place() -> str:
    """File and line of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_TRAINER) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
