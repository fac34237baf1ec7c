"""Node program: prove that one node can reach a port of another. Python 3.8, standard library only.

``main({"role": "listen", "port", "token", "clients", "seconds"})`` binds and greets that many
clients; replies {"bound", "error", "seen": [names]}.
``main({"role": "connect", "address", "port", "token", "name", "seconds"})`` replies {"ok", "error"}.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    return listen(request) if request["role"] == "listen" else connect(request)


def listen(request: dict[str, Any]) -> dict[str, Any]:
    seen: list[str] = []
    try:
        server = open_server(request["port"])
    except OSError as error:
        return {"bound": False, "error": error.strerror or str(error), "seen": seen}
    deadline = time.monotonic() + request["seconds"]
    with server:
        while len(seen) < request["clients"] and time.monotonic() < deadline:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                client, _ = server.accept()
            except socket.timeout:
                break
            with client:
                name = greet(client, request["token"])
                if name and name not in seen:
                    seen.append(name)
    return {"bound": True, "error": "", "seen": seen}


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
        server.bind(address)
        server.listen(128)
    except OSError:
        server.close()
        raise
    return server


def greet(client: socket.socket, token: str) -> str:
    """Name of a client that knows the token; '' for any other."""
    client.settimeout(2)
    try:
        line = read_line(client)
        word, _, name = line.partition(" ")
        if word != token:
            return ""
        client.sendall(("welcome " + token + "\n").encode())
        return name
    except (OSError, UnicodeDecodeError):
        return ""


def connect(request: dict[str, Any]) -> dict[str, Any]:
    """Tries again while refused, as the listener may still be starting."""
    deadline = time.monotonic() + request["seconds"]
    while True:
        left = deadline - time.monotonic()
        try:
            return {"ok": True, "error": say_hello(request, max(0.5, left))}
        except OSError as error:
            refused = error.errno == errno.ECONNREFUSED
            if not refused or left < 0.2:
                return {"ok": False, "error": reason(error)}
        time.sleep(0.1)


def say_hello(request: dict[str, Any], seconds: float) -> str:
    """'' when our listener answered; raises OSError."""
    with socket.create_connection((request["address"], request["port"]), timeout=seconds) as sock:
        sock.sendall((request["token"] + " " + request["name"] + "\n").encode())
        if read_line(sock) != "welcome " + request["token"]:
            raise OSError(errno.EPROTO, "something else answers there")
    return ""


def read_line(sock: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n"):
        more = sock.recv(256)
        if not more or len(data) > 1024:
            raise OSError(errno.EPROTO, "something else answers there")
        data += more
    return data.decode().strip()


def reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name cannot be resolved"
    if isinstance(error, socket.timeout) or error.errno == errno.ETIMEDOUT:
        return "timed out (a firewall?)"
    if error.errno == errno.ECONNREFUSED:
        return "refused (a firewall, or another machine at this address?)"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route"
    return error.strerror or str(error)
