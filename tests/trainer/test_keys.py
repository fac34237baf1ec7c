"""Who may talk to a server: its own key, the keys in clients/ beside its key file as it is now, nobody else."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from service_kit import INFO, client_of, new_keys, serving
from trainer.core.errors import ServiceError
from trainer.service.service_keys import admit_guest, read_key_file, write_key_file


@pytest.fixture
def guarded(tmp_path):
    """A server with a key file, and that file."""
    path = tmp_path / "service.key"
    write_key_file(path, new_keys())
    with serving(keys=read_key_file(path)) as server:
        yield server, path


def guest_of(path):
    """A key pair of its own for the servers with that key file."""
    return replace(new_keys(), server=read_key_file(path).public)


def may_enter(endpoint, keys, deadline=1.0) -> bool:
    with client_of(endpoint, deadline, keys) as client:
        try:
            return client.hello() == INFO
        except ServiceError as error:
            assert "service.key" in str(error)
            return False


def test_a_guest_is_admitted_as_long_as_its_file_is_there(guarded) -> None:
    server, path = guarded
    guest, other = guest_of(path), guest_of(path)
    assert may_enter(server.endpoint, read_key_file(path), 20) and not may_enter(server.endpoint, guest)
    file = admit_guest(path, "run-7", guest.public)
    assert may_enter(server.endpoint, guest, deadline=20) and not may_enter(server.endpoint, other)
    file.unlink()
    until = time.monotonic() + 30
    while may_enter(server.endpoint, guest):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert may_enter(server.endpoint, read_key_file(path), 20)


def test_a_guest_that_came_too_early_gets_in_once_admitted(guarded) -> None:
    server, path = guarded
    guest = guest_of(path)
    with client_of(server.endpoint, 30, guest) as client:
        pending = client.submit_hello()
        with pytest.raises(ServiceError, match=r"handshake refused"):
            pending.result(0.7)
        admit_guest(path, "late", guest.public)
        assert pending.result() == INFO


def test_several_keys_in_one_file_and_damaged_ones_beside(guarded) -> None:
    server, path = guarded
    one, two = guest_of(path), guest_of(path)
    folder = path.parent / "clients"
    folder.mkdir()
    (folder / "broken.key").write_bytes(b"\xff\xfe short\n" + b"x" * 100)
    (folder / "folder.key").mkdir()
    (folder / "notes.txt").write_text(two.public)
    (folder / "several.key").write_text(f"\n{one.public}\r\n\nshort\n")
    assert may_enter(server.endpoint, one, deadline=20) and not may_enter(server.endpoint, two)


def test_a_guest_speaks_only_with_servers_of_the_key_it_was_given(guarded) -> None:
    server, path = guarded
    guest = guest_of(path)
    admit_guest(path, "run", guest.public)
    assert not may_enter(server.endpoint, replace(guest, server=new_keys().public))


def test_a_key_file_for_a_notebook_says_where_its_servers_are(tmp_path) -> None:
    path, run = tmp_path / "products.key", new_keys()
    keys = replace(new_keys(), server=run.public, endpoints=("tcp://10.0.0.1:5000",), name="products")
    write_key_file(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == keys
    assert set(json.loads(path.read_text())) == {"public", "secret", "server", "endpoints", "name"}


@pytest.mark.parametrize("server", ["short", 5, "\u00e9" * 40])
def test_a_damaged_server_key_is_one_line(tmp_path, server) -> None:
    path, keys = tmp_path / "service.key", new_keys()
    write_key_file(path, keys)
    path.write_text(json.dumps({**json.loads(path.read_text()), "server": server}))
    with pytest.raises(ServiceError, match="is no key file"):
        read_key_file(path)
