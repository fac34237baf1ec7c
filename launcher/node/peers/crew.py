"""Which nodes a run can do without, by their roles and the parts they hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Crew:
    """The nodes of a run. A server may go while others hold its parts, a client if that is wanted; the lead never."""

    lead: int  #: node_rank of the hub
    roles: tuple[str, ...] = ()  #: worker, server or client, by node_rank; empty: all are workers
    parts: tuple[tuple[int, ...], ...] = ()  #: held, by node_rank
    go_on: bool = False  #: without lost clients

    def role(self, k: int) -> str:
        return self.roles[k] if self.roles else "worker"

    def can_lose(self, k: int, gone: Collection[int] = ()) -> bool:
        """Whether the run can do without node ``k``, where ``gone`` have left already."""
        if self.role(k) == "server":
            return k != self.lead and not self.last_copies(k, gone) and self._clients_have_others(k, gone)
        return self.role(k) == "client" and self.go_on and k != self.lead

    def spare(self, gone: Collection[int] = ()) -> list[int]:
        """All nodes of which any one could be lost next."""
        return [k for k in range(len(self.roles)) if k not in gone and self.can_lose(k, gone)]

    def last_copies(self, k: int, gone: Collection[int] = ()) -> list[int]:
        """Parts that nobody holds but ``k`` and those who are gone."""
        return [part for part in self._held(k) if not self.holders([part], {*gone, k})]

    def holders(self, parts: Collection[int], gone: Collection[int]) -> list[int]:
        """Nodes that hold any of ``parts``."""
        return [j for j in range(len(self.parts)) if j not in gone and set(parts) & set(self._held(j))]

    def served_by(self, k: int, gone: Collection[int]) -> list[int]:
        """Who still holds the parts of ``k``."""
        return self.holders(self._held(k), {*gone, k})

    def held(self, k: int) -> str:
        """``parts 2, 3``."""
        return parts_words(self._held(k))

    def _held(self, k: int) -> tuple[int, ...]:
        return self.parts[k] if k < len(self.parts) else ()

    def _clients_have_others(self, k: int, gone: Collection[int]) -> bool:
        """Clients ask server nodes only, where there are any."""
        servers = [j for j, role in enumerate(self.roles) if role == "server" and j != k and j not in gone]
        return bool(servers) or "client" not in self.roles


def parts_words(parts: Collection[int]) -> str:
    """``part 2``, ``parts 2, 3``."""
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(map(str, sorted(parts)))}"
