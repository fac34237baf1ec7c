"""Node program: tests which ports of other nodes this node can connect to. Python 3.8, standard library only.

- ``{"op": "open", "token", "rank", "ports"}`` listens on ``ports`` and on a free port; replies {"refused": {port:
  why}, "free": port}. The ports stay open until the process ends.
- ``{"op": "connect", "rank", "token", "targets": [[rank, address, [ports]]], "seconds"}`` connects to all targets
  concurrently; replies {"blocked": [[rank, address, port, why]]}, ``why`` being a text such as "refused".

A listener sends the token and its node rank to each client, so that another program on the port is detected.
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

_IN_FLIGHT = 256  # concurrent connections; well below the usual limit on open files

_BACKLOG = 4096

_NO_LINGER = struct.pack("ii", 1, 0)  # close by RST, without TIME_WAIT on either side

_STRANGER, _NO_NAME, _NO_ANSWER = "stranger", "name", "no answer"


def main(request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "open":
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
    return {"blocked": list(connect_all(request))}


def greeting(token: str, rank: int) -> bytes:
    """Return the bytes that a listener of node ``rank`` sends to each client."""
    return ("gnnfleet %s %d\n" % (token, rank)).encode()


# -- listening -----------------------------------------------------------


class Listeners:
    def __init__(self, greeting: bytes):
        self.greeting, self.poll = greeting, select.epoll()
        self.servers = {}  # type: dict[int, socket.socket]

    def add(self, port: int) -> int:
        """Listen on ``port`` (0: a free one); return the port. Raises OSError."""
        server = _open_server(port)
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
        while True:
            try:
                client, _ = server._accept()  # needs half the system calls of accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(0.05)  # the listener stays ready, so that poll would return at once
                return
            try:
                os.write(client, self.greeting)
            except OSError:
                pass  # the client has closed the connection
            os.close(client)


def _open_server(port: int) -> socket.socket:
    """Return a non-blocking socket that listens on all IPv6 and IPv4 addresses; IPv4 only on a machine without IPv6."""
    try:
        server, address = socket.socket(socket.AF_INET6, socket.SOCK_STREAM), ("::", port)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return bound(server, address)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return bound(socket.socket(socket.AF_INET, socket.SOCK_STREAM), ("0.0.0.0", port))


def bound(server: socket.socket, address: tuple[str, int]) -> socket.socket:
    """Bind a socket and listen, non-blocking; close it and raise OSError on failure."""
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setblocking(False)
        server.bind(address)
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server


# -- connecting ----------------------------------------------------------


def connect_all(request: dict[str, Any]) -> Iterator[list[Any]]:
    """Connect to all targets of a request; yield [rank, address, port, why] for each that cannot be reached.

    Nodes with a higher node_rank than this node are tried first, so that nodes do not all connect to the same one.
    """
    own = request["rank"]
    targets = sorted(request["targets"], key=lambda target: ((target[0] - own) <= 0, target[0]))
    numeric = resolved({address for _, address, _ in targets})
    attempts = []
    for rank, address, ports in targets:
        for port in ports:
            if numeric[address]:
                attempts.append(_Attempt(rank, address, numeric[address], port, greeting(request["token"], rank)))
            else:
                yield [rank, address, port, _NO_NAME]
    for attempt, why in _run_attempts(attempts, request["seconds"]):
        if why:
            yield [attempt.rank, attempt.address, attempt.port, why]


class _Attempt:
    """An attempt to connect to one port of a node. greeting: the bytes that the listener has to send."""

    __slots__ = ("rank", "address", "numeric", "port", "greeting", "socket", "deadline", "received")

    def __init__(self, rank: int, address: str, numeric: str, port: int, greeting: bytes):
        self.rank, self.address, self.numeric, self.port, self.greeting = rank, address, numeric, port, greeting
        self.received = b""

    def start(self, deadline: float) -> int:
        """Start to connect; return the socket's descriptor. Raises OSError when the system refuses at once."""
        family = socket.AF_INET6 if ":" in self.numeric else socket.AF_INET
        self.socket, self.deadline = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK), deadline
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        failed = self.socket.connect_ex((self.numeric, self.port))
        if failed not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise OSError(failed, os.strerror(failed))
        return self.socket.fileno()

    def read(self) -> str | None:
        """Read more of the greeting; return '' once it is complete and right, None if more may come, else the error."""
        try:
            data = self.socket.recv(256)
        except BlockingIOError:
            return None
        except OSError as error:
            return meaning(error)
        self.received += data
        if self.received == self.greeting:
            return ""
        return None if data and self.greeting.startswith(self.received) else _STRANGER


def _run_attempts(attempts: list[_Attempt], seconds: float) -> Iterator[tuple[_Attempt, str]]:
    """Run all attempts, at most ``_IN_FLIGHT`` at a time; yield each attempt with its error, or '' on success.

    seconds: time limit of each attempt.
    """
    poll, running = select.epoll(), {}  # type: Any, dict[int, _Attempt]
    waiting = iter(attempts)
    left = len(attempts)
    while left:
        while len(running) < _IN_FLIGHT:
            attempt = next(waiting, None)
            if attempt is None:
                break
            try:
                number = attempt.start(time.monotonic() + seconds)
                running[number] = attempt
                poll.register(number, select.EPOLLIN)
            except OSError as error:
                left -= 1
                yield attempt, meaning(error)
        # Wait until data arrives or a deadline passes.
        if not running:
            continue
        first = next(iter(running.values()))  # the oldest one has the earliest deadline
        events = poll.poll(max(0.0, first.deadline - time.monotonic()))
        decided = {}  # by descriptor, why the attempt has failed; '' if it has succeeded
        for number, _ in events:
            why = running[number].read()
            if why is not None:
                decided[number] = why
        now = time.monotonic()
        for number, attempt in running.items():
            if attempt.deadline > now:
                break
            decided.setdefault(number, _NO_ANSWER)
        for number, why in decided.items():
            attempt = running.pop(number)
            attempt.socket.close()
            left -= 1
            yield attempt, why
    poll.close()


def resolved(names: set[str]) -> dict[str, str]:
    """Return the numeric address of each name, '' if it does not resolve. All names together take 10 s at most."""
    found = {name: name if _is_numeric(name) else "" for name in names}
    unknown = [name for name in names if not found[name]]
    if not unknown:
        return found
    import threading

    def resolve(name: str) -> None:
        try:
            found[name] = str(socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError):
            pass  # stays ''

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in unknown]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return dict(found)


def _is_numeric(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, name)
            return True
        except OSError:
            continue
    return False


def meaning(error: OSError) -> str:
    """Return "refused", "no route", "no answer" or "reset" for the usual errors, else the system's message."""
    known = {
        errno.ECONNREFUSED: "refused",
        errno.EHOSTUNREACH: "no route",
        errno.ENETUNREACH: "no route",
        errno.EINVAL: "no route",  # a blackhole route
        errno.EACCES: "no route",  # a prohibit route
        errno.EADDRNOTAVAIL: "no route",  # no address of that family here
        errno.ETIMEDOUT: _NO_ANSWER,
        errno.ECONNRESET: "reset",
    }
    return known.get(error.errno or 0, error.strerror or str(error))


_RTM_GETADDR, _RTM_NEWADDR = 22, 20

_REQUEST_DUMP = 0x301

_IFA_ADDRESS, _IFA_LOCAL = 1, 2

_TENTATIVE = 0x40  # not usable yet

_SCOPE_LINK = 253  # link-local addresses are ambiguous without an interface


def addresses() -> list[tuple[str, str]]:
    """Return (interface name, address) of this machine's addresses that are not link-local, in the kernel's order."""
    names = dict(socket.if_nameindex())
    return [(names.get(number, ""), address) for number, address in _kernel_addresses()]


def _kernel_addresses() -> Iterator[tuple[int, str]]:
    """Yield (interface number, address) for each address of this machine, from the kernel by netlink (RTM_GETADDR)."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    try:
        sock.sendall(struct.pack("=IHHIIB7x", 24, _RTM_GETADDR, _REQUEST_DUMP, 1, 0, socket.AF_UNSPEC))
        while True:
            data = sock.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind != _RTM_NEWADDR:
                    return  # NLMSG_DONE, or an error
                # An address, unless it is link-local or tentative.
                message = data[16:length]
                family, _, flags, scope, number = struct.unpack_from("=BBBBI", message)
                found, at = {}, 8
                while at + 4 <= len(message):
                    size, name = struct.unpack_from("=HH", message, at)
                    found[name] = message[at + 4 : at + size]
                    at += max(4, (size + 3) & ~3)
                raw = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
                if raw and scope != _SCOPE_LINK and not flags & _TENTATIVE:
                    yield number, socket.inet_ntop(family, raw)
                data = data[(length + 3) & ~3 :]
    finally:
        sock.close()
