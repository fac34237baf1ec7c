"""Nodes that a run goes on without: said once, and the ranks of this node told who is left."""

from __future__ import annotations

from typing import Any

from launcher.node.peers.model import Peers
from launcher.node.supervisor.journal import Journal


class Departed:
    """What this supervisor has done about them."""

    def __init__(self, journal: Journal, peers: Peers) -> None:
        self._journal, self._peers = journal, peers
        self._told: set[str] = set()
        self._generation = 0

    def news(self) -> list[dict[str, Any]]:
        """A finding for each node that has left since the last call."""
        found = []
        for k, gone in self._peers.gone.items():
            if k not in self._told:
                self._told.add(k)
                self._journal.event(gone["kind"], lost=int(k), reason=gone["text"])
                finding = {"t": gone["t"], "kind": gone["kind"], "node_rank": int(k), "rank": None}
                found.append({**finding, "text": gone["text"], "stop": False})
        return found

    def heed_team(self) -> None:
        """Have the ranks know who goes on when those of another node do not."""
        team = self._peers.team
        if team is not None and team["generation"] > self._generation:
            self._generation = team["generation"]
            self._journal.put("team.json", team)
            self._journal.event("team", generation=self._generation, ranks=team["ranks"])
