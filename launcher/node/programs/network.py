"""Node program: tests whether nodes reach ports of each other. Python 3.8, standard library only.

``{"op": "open", "token", "rank", "ports"}`` listens on these ports and on a free one; replies {"refused": {port: why},
"free": port}.
``{"op": "connect", "rank", "token", "targets": [[rank, address, [ports]]], "seconds"}`` connects to all of them at
once; replies {"blocked": [[rank, address, port, why]]}, ``why`` as in ``meaning``. Listening ends with the process.

A listener greets whoever comes with the token and its rank, so that nothing else can be taken for it.
"""

from __future__ import annotations

import _socket as socket
import _thread
import errno
import os
import select
import struct
import time

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any, Iterator

IN_FLIGHT = 256  # connections at a time, well below the usual limit on open files

BACKLOG = 4096

NO_LINGER = struct.pack("ii", 1, 0)  # closing leaves no TIME_WAIT, on either side

STRANGER, NO_NAME, NO_ANSWER = "stranger", "name", "no answer"


def main(request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "open":
        return open_all(request)
    return {"blocked": list(connect_all(request))}


def greeting(token: str, rank: int) -> bytes:
    return ("gnnfleet %s %d\n" % (token, rank)).encode()


# -- listening -----------------------------------------------------------


def open_all(request: dict[str, Any]) -> dict[str, Any]:
    listeners = Listeners(greeting(request["token"], request["rank"]))
    refused = {}
    for port in request["ports"]:
        try:
            listeners.add(port)
        except OSError as error:
            refused[str(port)] = error.strerror or str(error)
    free = listeners.add(0)
    listeners.start()
    return {"refused": refused, "free": free}


class Listeners:
    """Ports that greet whoever connects, in a thread of their own."""

    def __init__(self, words: bytes):
        self.words, self.poll = words, select.epoll()
        self.servers = {}  # type: dict[int, socket.socket]

    def add(self, port: int) -> int:
        """Listen on ``port`` (0: any); returns the port. Raises OSError."""
        server = open_server(port)
        self.servers[server.fileno()] = server
        self.poll.register(server.fileno(), select.EPOLLIN)
        return int(server.getsockname()[1])

    def start(self) -> None:
        _thread.start_new_thread(self.serve, ())

    def serve(self) -> None:
        while True:
            for number, _ in self.poll.poll():
                self.greet_all(self.servers[number])

    def greet_all(self, server: Any) -> None:
        """Greet everyone who waits at this listener."""
        while True:
            try:
                client, _ = server._accept()  # half the system calls of accept()
            except OSError:
                return
            try:
                os.write(client, self.words)
            except OSError:
                pass  # it has gone already
            os.close(client)


def open_server(port: int) -> socket.socket:
    """A listener on all addresses, as torch.distributed's store is; IPv4 alone where there is no IPv6."""
    try:
        server, address = socket.socket(socket.AF_INET6, socket.SOCK_STREAM), ("::", port)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return bound(server, address)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return bound(socket.socket(socket.AF_INET, socket.SOCK_STREAM), ("0.0.0.0", port))


def bound(server: socket.socket, address: tuple[str, int]) -> socket.socket:
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setblocking(False)
        server.bind(address)
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    return server


# -- connecting ----------------------------------------------------------


def connect_all(request: dict[str, Any]) -> Iterator[list[Any]]:
    """[rank, address, port, why] of each that was not reached; those after our own rank come first, so that
    not everyone knocks at the same door."""
    own = request["rank"]
    targets = sorted(request["targets"], key=lambda target: ((target[0] - own) <= 0, target[0]))
    numeric = resolved({address for _, address, _ in targets})
    ways = []
    for rank, address, ports in targets:
        for port in ports:
            if numeric[address]:
                ways.append(Way(rank, address, numeric[address], port, greeting(request["token"], rank)))
            else:
                yield [rank, address, port, NO_NAME]
    for way, why in knock(ways, request["seconds"]):
        if why:
            yield [way.rank, way.address, way.port, why]


class Way:
    """One connection to try."""

    __slots__ = ("rank", "address", "numeric", "port", "words", "socket", "deadline", "heard")

    def __init__(self, rank: int, address: str, numeric: str, port: int, words: bytes):
        self.rank, self.address, self.numeric, self.port, self.words = rank, address, numeric, port, words
        self.heard = b""

    def start(self, deadline: float) -> int:
        """Begin to connect; raises OSError where that fails at once."""
        family = socket.AF_INET6 if ":" in self.numeric else socket.AF_INET
        self.socket, self.deadline = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK), deadline
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        failed = self.socket.connect_ex((self.numeric, self.port))
        if failed not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise OSError(failed, os.strerror(failed))
        return self.socket.fileno()

    def listen(self) -> str | None:
        """'' when our listener has greeted, why not when it has not, None when more may come."""
        try:
            data = self.socket.recv(256)
        except BlockingIOError:
            return None
        except OSError as error:
            return meaning(error)
        self.heard += data
        if self.heard == self.words:
            return ""
        return None if data and self.words.startswith(self.heard) else STRANGER


def knock(ways: list[Way], seconds: float) -> Iterator[tuple[Way, str]]:
    """Each way and why it failed, '' for those that did not."""
    poll, open_ways = select.epoll(), {}  # type: Any, dict[int, Way]
    waiting = iter(ways)
    left = len(ways)
    while left:
        while len(open_ways) < IN_FLIGHT:
            way = next(waiting, None)
            if way is None:
                break
            try:
                number = way.start(time.monotonic() + seconds)
                open_ways[number] = way
                poll.register(number, select.EPOLLIN)
            except OSError as error:
                left -= 1
                yield way, meaning(error)
        for number, why in told(poll, open_ways):
            way = open_ways.pop(number)
            way.socket.close()
            left -= 1
            yield way, why
    poll.close()


def told(poll: Any, open_ways: dict[int, Way]) -> list[tuple[int, str]]:
    """(file number, why) of those that are decided: by an answer, or by the time that has passed."""
    if not open_ways:
        return []
    first = next(iter(open_ways.values()))  # the oldest, so the first whose time is over
    events = poll.poll(max(0.0, first.deadline - time.monotonic()))
    decided = []
    for number, _ in events:
        why = open_ways[number].listen()
        if why is not None:
            decided.append((number, why))
    now, done = time.monotonic(), {number for number, _ in decided}
    for number, way in open_ways.items():
        if way.deadline > now:
            break
        if number not in done:
            decided.append((number, NO_ANSWER))
    return decided


def resolved(names: set[str]) -> dict[str, str]:
    """A numeric address for each; '' for names that nobody knows. All are asked for at once."""
    found = {name: name if is_numeric(name) else "" for name in names}
    unknown = [name for name in names if not found[name]]
    if not unknown:
        return found
    import threading

    def resolve(name: str) -> None:
        try:
            found[name] = str(socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM)[0][4][0])
        except OSError:
            pass  # stays ''

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in unknown]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return dict(found)


def is_numeric(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, name)
            return True
        except OSError:
            continue
    return False


def meaning(error: OSError) -> str:
    """One of: refused, no route, no answer, reset, or what the system says."""
    known = {
        errno.ECONNREFUSED: "refused",
        errno.EHOSTUNREACH: "no route",
        errno.ENETUNREACH: "no route",
        errno.EINVAL: "no route",  # a blackhole route
        errno.EACCES: "no route",  # a prohibit route
        errno.EADDRNOTAVAIL: "no route",  # no address of that family here
        errno.ETIMEDOUT: NO_ANSWER,
        errno.ECONNRESET: "reset",
    }
    return known.get(error.errno or 0, error.strerror or str(error))


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
