"""Which process this is, read once from the environment that torchrun sets."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import SettingsError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """One process among all of the run; the defaults are a single process without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    host: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Ranks:
        """Read RANK, WORLD_SIZE, … ; a single process when none is set. Raises ``SettingsError``."""
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls(node_rank=_number(environ, "NODE_RANK"), host=socket.gethostname())
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            raise SettingsError(f"{', '.join(missing)} not set; start the trainer by torchrun, or without RANK")
        ranks = cls(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK"),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
            node_rank=_number(environ, "NODE_RANK" if "NODE_RANK" in environ else "GROUP_RANK"),
            master_addr=environ["MASTER_ADDR"],
            master_port=_number(environ, "MASTER_PORT"),
            host=socket.gethostname(),
        )
        if not 0 <= ranks.rank < ranks.world_size:
            raise SettingsError(f"RANK {ranks.rank} is not below WORLD_SIZE {ranks.world_size}")
        return ranks

    def __str__(self) -> str:
        return f"rank {self.rank} (node{self.node_rank}, {self.host})"


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{name}={text!r} in the environment is not a whole number") from None
