"""Passwords and passphrases: asked once for all nodes they are for, kept in memory only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import click

from launcher.command import Secret
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import TransportError, UsageError
from launcher.transport.keys import is_locked
from launcher.transport.login import Credentials
from launcher.transport.sshconfig import find_way

AskPassword = Callable[[str], Secret]  #: given the prompt, without a colon

_SHOWN = 3  # hosts named in a prompt


def ask_password(prompt: str) -> Secret:
    """Ask on the terminal, without echo; raises UsageError where there is none."""
    if not _at_terminal():
        raise UsageError(
            f"the config asks for a password (`password: true`), but there is no terminal to ask on: {prompt}; "
            "start from a terminal, or set `key` to a private key that needs no password"
        )
    return Secret(click.prompt(prompt, hide_input=True, err=True))


def _at_terminal() -> bool:
    """Whether somebody can be asked: getpass uses the controlling terminal, else standard input."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return sys.stdin.isatty()
    return True


@dataclass(frozen=True)
class _Question:
    """One secret, wherever it is wanted: a user's password, or the passphrase of a key file."""

    kind: str  #: Password or Passphrase
    about: str  #: user name or path

    def prompt(self, hosts: Iterable[str]) -> str:
        names = list(dict.fromkeys(hosts))
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        where = names[0] if len(names) == 1 else f"{len(names)} nodes ({shown})"
        if self.kind == "Passphrase":
            return f"Passphrase for key {self.about}, for {where}"
        return f"Password for {self.about} on {where}"


class Passwords:
    """The answers so far, and what each node gets of them."""

    def __init__(self, config: ClusterConfig, ask: AskPassword = ask_password):
        self._config, self._ask = config, ask
        self._questions: dict[int, tuple[_Question, ...]] = {}
        self._answers: dict[_Question, Secret] = {}
        self._other: dict[tuple[int, _Question], Secret] = {}  # given for the nodes that refused the first
        wanted = [rank for rank, node in enumerate(config.nodes) if node.password and config.transport == "ssh"]
        for rank in wanted:
            self._questions[rank] = (_first_question(config.nodes[rank]),)
        for question in dict.fromkeys(self._questions[rank][0] for rank in wanted):
            ranks = [rank for rank in wanted if question in self._questions[rank]]
            self._answers[question] = ask(question.prompt(self._host(rank) for rank in ranks))

    def credentials(self, node_rank: int) -> Credentials:
        """What a node's login is tried with."""
        node = self._config.nodes[node_rank]
        secrets = {question.kind: self._answer(node_rank, question) for question in self._questions.get(node_rank, ())}
        key = os.path.expanduser(node.key) if node.key else None
        return Credentials(key, secrets.get("Password"), secrets.get("Passphrase"))

    def _answer(self, node_rank: int, question: _Question) -> Secret:
        return self._other.get((node_rank, question), self._answers[question])

    def ask_again(self, refused: Collection[int], wants_password: Collection[int]) -> None:
        """Once more for the nodes that refused; those of ``wants_password`` took the key and want a password, too."""
        for rank in wants_password:
            self._questions[rank] = (*self._questions[rank], _password_of(self._config.nodes[rank]))
        ranks = sorted({*refused, *wants_password})
        for question in dict.fromkeys(self._questions[rank][-1] for rank in ranks):
            those = [rank for rank in ranks if self._questions[rank][-1] == question]
            again = any(rank in refused for rank in those)
            prompt = question.prompt(self._host(rank) for rank in those)
            answer = self._ask(f"Not accepted. {prompt}" if again else prompt)
            self._answers.setdefault(question, answer)
            self._other |= {(rank, question): answer for rank in those}

    def _host(self, node_rank: int) -> str:
        return self._config.nodes[node_rank].host


def _first_question(node: NodeConfig) -> _Question:
    """The passphrase of a key that is locked, else a password."""
    if node.key and is_locked(os.path.expanduser(node.key)):
        return _Question("Passphrase", node.key)
    return _password_of(node)


def _password_of(node: NodeConfig) -> _Question:
    try:
        user = find_way(node.host, node.user, node.port)[-1].user
    except TransportError:  # connecting will say so
        user = node.user or "you"
    return _Question("Password", user)
