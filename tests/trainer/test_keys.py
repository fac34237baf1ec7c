"""Tests of admission to a graph server: its own key, and the keys in `clients/` beside it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from service_kit import INFO, admit_guest, client_of, new_keys, serving, write_key_file
from trainer.core.errors import ServiceError
from trainer.service.service_keys import read_key_file


@pytest.fixture
def guarded(tmp_path):
    path = tmp_path / "service.key"
    write_key_file(path, new_keys())
    with serving(keys=read_key_file(path)) as server:
        yield server, path


def guest_of(path):
    return replace(new_keys(), server=read_key_file(path).public)


def is_admitted(endpoint, keys, deadline=1.0) -> bool:
    with client_of(endpoint, deadline, keys) as client:
        try:
            return client.greet().result() == INFO
        except ServiceError as error:
            assert "service.key" in str(error)
            return False


@pytest.mark.slow
def test_a_guest_is_admitted_while_its_file_exists(guarded) -> None:
    server, path = guarded
    guest, other = guest_of(path), guest_of(path)
    assert is_admitted(server.endpoint, read_key_file(path), 20) and not is_admitted(server.endpoint, guest)
    file = admit_guest(path, "run-7", guest.public)
    assert is_admitted(server.endpoint, guest, deadline=20) and not is_admitted(server.endpoint, other)
    file.unlink()
    until = time.monotonic() + 30
    while is_admitted(server.endpoint, guest):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert is_admitted(server.endpoint, read_key_file(path), 20)


def test_a_guest_connects_once_it_is_admitted(guarded) -> None:
    server, path = guarded
    guest = guest_of(path)
    with client_of(server.endpoint, 30, guest) as client:
        pending = client.greet()
        with pytest.raises(ServiceError, match=r"handshake refused"):
            pending.result(0.7)
        admit_guest(path, "late", guest.public)
        assert pending.result() == INFO


def test_files_with_several_keys_and_damaged_files(guarded) -> None:
    server, path = guarded
    one, two = guest_of(path), guest_of(path)
    folder = path.parent / "clients"
    folder.mkdir()
    (folder / "broken.key").write_bytes(b"\xff\xfe short\n" + b"x" * 100)
    (folder / "folder.key").mkdir()
    os.mkfifo(folder / "a_pipe.key")  # opening it would block
    (folder / "notes.txt").write_text(two.public)
    (folder / "several.key").write_text(f"\n{one.public}\r\n\nshort\n")
    assert is_admitted(server.endpoint, one, deadline=20) and not is_admitted(server.endpoint, two)


def test_a_guest_connects_only_to_servers_with_the_expected_key(guarded) -> None:
    server, path = guarded
    guest = guest_of(path)
    admit_guest(path, "run", guest.public)
    assert not is_admitted(server.endpoint, replace(guest, server=new_keys().public))


def test_a_notebooks_key_file_contains_the_endpoints(tmp_path) -> None:
    path, run = tmp_path / "products.key", new_keys()
    keys = replace(new_keys(), server=run.public, endpoints=("tcp://10.0.0.1:5000",), name="products")
    write_key_file(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == keys
    assert set(json.loads(path.read_text())) == {"public", "secret", "server", "endpoints", "name"}


def test_a_pipe_is_no_key_file(tmp_path) -> None:
    os.mkfifo(tmp_path / "service.key", 0o600)
    with pytest.raises(ServiceError, match="cannot be read: it is not a regular file"):
        read_key_file(tmp_path / "service.key")


@pytest.mark.parametrize("server", ["short", 5, "\u00e9" * 40])
def test_a_damaged_server_key_is_refused(tmp_path, server) -> None:
    path, keys = tmp_path / "service.key", new_keys()
    write_key_file(path, keys)
    path.write_text(json.dumps({**json.loads(path.read_text()), "server": server}))
    with pytest.raises(ServiceError, match="is no key file"):
        read_key_file(path)
