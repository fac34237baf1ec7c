"""The addresses of this machine's network interfaces, from the kernel (rtnetlink). Python 3.8, only what it brings."""

from __future__ import annotations

import _socket as socket
import struct

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Iterator

RTM_GETADDR, RTM_NEWADDR, NLMSG_DONE = 22, 20, 3

REQUEST_DUMP = 0x301

IFA_ADDRESS, IFA_LOCAL = 1, 2

TENTATIVE = 0x40  # not usable yet

SCOPE_LINK = 253  # means nothing without naming an interface


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of all that other machines might use, and of loopback, in the kernel's order."""
    names = dict(socket.if_nameindex())
    return [(names.get(number, ""), address) for number, address in dumped()]


def dumped() -> Iterator[tuple[int, str]]:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    try:
        sock.sendall(struct.pack("=IHHIIB7x", 24, RTM_GETADDR, REQUEST_DUMP, 1, 0, socket.AF_UNSPEC))
        while True:
            data = sock.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind != RTM_NEWADDR:
                    return  # NLMSG_DONE, or an error
                yield from one(data[16:length])
                data = data[(length + 3) & ~3 :]
    finally:
        sock.close()


def one(message: bytes) -> Iterator[tuple[int, str]]:
    """(interface number, address) in one answer; nothing for those of a link or not yet usable."""
    family, _, flags, scope, number = struct.unpack_from("=BBBBI", message)
    found, at = {}, 8
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        found[kind] = message[at + 4 : at + length]
        at += max(4, (length + 3) & ~3)
    raw = found.get(IFA_LOCAL) or found.get(IFA_ADDRESS)
    if raw and scope != SCOPE_LINK and not flags & TENTATIVE:
        yield number, socket.inet_ntop(family, raw)
