"""Whether all ranks were given the same seeds: each loader shares them out itself."""

from __future__ import annotations

import itertools

import torch.distributed as dist

from trainer.errors import SettingsError

_numbers = itertools.count()


class SameOnAllRanks:
    """Compares a loader's seeds with those of the same loader on other ranks, once, without waiting for them.

    Loaders are told apart by the order in which they were made.
    """

    def __init__(self, digest: str, rank: int, world_size: int):
        self._digest, self._rank, self._world_size = digest, rank, world_size
        self._number = next(_numbers) if world_size > 1 else 0
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
        first = store.compare_set(f"gnnfleet/loader/{self._number}", "", own).decode()
        if first.split()[0] != self._digest:
            raise SettingsError(
                f"loader {self._number} has other seeds, times or settings on rank {self._rank} than on"
                f" {first.partition(' ')[2]}. Every rank must pass the same, complete seeds: the loader shares each"
                " batch out over the ranks. Do not split them by rank, and shuffle by shuffle=True."
                " For a loader that is this rank's alone, pass rank=0, layout=RankLayout.single(num_parts)"
            )
        self._done = True
