"""``Request``: what a client asks of a graph server in one message, and the reply to it."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from trainer.wire.body import Body, pack
from trainer.wire.columns import FormOf
from trainer.wire.frames import Flag, Kind, Message, Status

A = TypeVar("A")  #: an answer

R = TypeVar("R", bound="Request[Any]")


class Request(msgspec.Struct, Generic[A], frozen=True, array_like=True, eq=False):
    """One kind of request. Its fields are sent, and its answer is an ``A``.

    What a stranger sends is checked by ``check``, a reply by ``read_reply``.
    """

    kind: ClassVar[Kind]
    replies: ClassVar[Any] = None  #: type of the body of a reply; None: a reply has arrays only

    def message(self, flags: Flag = Flag.NONE) -> Message:
        """Encode the request. The channel sets its id. Raises ``WireError`` if it exceeds a limit."""
        arrays, body = pack(self)
        return Message(self.kind, Status.REQUEST, 0, tuple(arrays), body, flags)

    @classmethod
    def read(cls: type[R], message: Message) -> R:
        """Decode a request. Raises ``WireError`` if it is invalid or exceeds a limit."""
        request: R = _body(cls).read(message)
        request.check()
        return request

    def check(self) -> None:
        """Raise ``WireError`` for values that no server accepts."""

    def reply(self, message: Message, answer: A, form_of: FormOf) -> Message:
        """Encode the answer to this request, which came as ``message``.

        ``form_of``: in which form rows of attributes are sent. Raises ``DataError`` for rows that this form cannot
        represent.
        """
        return message.reply(*pack(answer)) if self.replies else message.reply([answer])  # type: ignore[list-item]

    def read_reply(self, message: Message) -> A:
        """Decode the reply. Raises ``WireError`` if it does not fit the request."""
        answer: A = _body(self.replies).read(message)
        return answer


@functools.cache
def _body(of: Any) -> Body[Any]:
    return Body(of)
