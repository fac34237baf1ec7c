"""Test kit: an S3 server (moto) at an address that all hosts reach, behind a proxy that records requests and can cut
connections.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_DEFAULT_REGION": "us-east-1"}
_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) /([^ ?]+)[^ ]* HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)
_LONGEST_HEAD = 8192  # bytes
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    client: str  #: address
    method: str
    path: str  #: bucket and key
    start: int  #: first byte that is asked for


@dataclass
class S3Server:
    """An S3 server and the proxy in front of it. ``endpoint``: URL of the proxy.

    The proxy cuts the next ``cuts`` replies after ``cut_at`` bytes each. While ``held`` is true, the proxy holds back
    requests for ranges that begin after the first byte of a file.
    """

    endpoint: str
    client: Any  #: boto3's client, which bypasses the proxy
    requests: list[Request] = field(default_factory=list)
    cuts: int = 0
    cut_at: int = 1 << 20
    held: bool = False

    def of(self, client: str, method: str = "GET") -> list[Request]:
        return [each for each in self.requests if (each.client, each.method) == (client, method)]

    def flip_byte(self, key: str) -> None:
        data = bytearray(self.client.get_object(Bucket="bucket", Key=key)["Body"].read())
        data[len(data) // 2] ^= 1
        self.client.put_object(Bucket="bucket", Key=key, Body=bytes(data))


@contextmanager
def s3_server(address: str) -> Iterator[S3Server]:
    """Start moto on this machine and its proxy at ``address``, with an empty bucket ``bucket``."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    target = moto.get_host_and_port()
    names = {"aws_access_key_id": "tester", "aws_secret_access_key": "hush", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url="http://{}:{}".format(*target), **names)
    client.create_bucket(Bucket="bucket")
    with socket.create_server((address, 0)) as listener:
        server = S3Server("http://{}:{}".format(*listener.getsockname()), client)
        threading.Thread(target=_accept, args=(listener, target, server), daemon=True).start()
        try:
            yield server
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            server.held = False
            client.delete_objects(Bucket="bucket", Delete={"Objects": _keys(client)})
            client.delete_bucket(Bucket="bucket")  # moto keeps its buckets in this process
            moto.stop()


def _keys(client: Any) -> list[dict[str, str]]:
    listed = client.list_objects_v2(Bucket="bucket").get("Contents", [])
    return [{"Key": each["Key"]} for each in listed] or [{"Key": "none"}]


def _accept(listener: socket.socket, target: tuple[str, int], server: S3Server) -> None:
    while True:
        try:
            near, (client, *_) = listener.accept()
        except OSError:  # closed
            return
        far = socket.create_connection(target)
        threading.Thread(target=_forward_requests, args=(near, far, client, server), daemon=True).start()
        threading.Thread(target=_forward_replies, args=(far, near, server), daemon=True).start()


def _forward_requests(near: socket.socket, far: socket.socket, client: str, server: S3Server) -> None:
    rest = b""
    with near, far, suppress(OSError):
        while data := near.recv(1 << 16):
            rest += data
            for found in _REQUEST.finditer(rest):
                begin = _RANGE.search(b"\r\n" + found[3])
                start = int(begin[1]) if begin else 0
                server.requests.append(Request(client, found[1].decode(), found[2].decode(), start))
                while start and server.held:
                    time.sleep(0.02)
            last = max((found.end() for found in _REQUEST.finditer(rest)), default=0)
            rest = rest[max(last, len(rest) - _LONGEST_HEAD) :]  # the body of an upload is not searched again and again
            far.sendall(data)


def _forward_replies(far: socket.socket, near: socket.socket, server: S3Server) -> None:
    count = 0
    with near, far, suppress(OSError):
        while data := far.recv(1 << 16):
            near.sendall(data)
            count += len(data)
            if server.cuts and count >= server.cut_at:
                server.cuts -= 1
                near.shutdown(socket.SHUT_RDWR)
                return
