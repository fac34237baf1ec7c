"""Room for many connections: each sampler thread holds one to each other host."""

from __future__ import annotations

import functools
import resource

import zmq

_CLIENT_IO_THREADS = 2  #: decryption of answers runs in these

_MAX_SOCKETS = 65_535  #: libzmq's own ceiling; its default of 1023 is reached by 42 hosts × 8 threads

_MAX_FILES = 65_536


@functools.cache
def client_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of all clients in this process."""
    allow_many_files()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(_CLIENT_IO_THREADS)
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


def allow_many_files() -> None:
    """Raise the soft limit of open files; the usual 1024 may be too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
