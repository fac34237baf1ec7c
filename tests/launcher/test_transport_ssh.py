"""Tests of the SSH transport: keys, passwords, host keys, ssh config, lost connections."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from paramiko.hostkeys import HostKeys

from launcher.command import Command
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import AuthError, ConnectionLost, HostKeyError, TransportError, UnreachableError
from launcher.transport import close_all, connect_all, openssh, ssh_config
from launcher.transport import ssh as ssh_module
from launcher.transport.auth import Credentials, key_problem
from launcher.transport.host_keys import read_known_hosts
from launcher.transport.remote import RemoteTransport
from launcher.transport.ssh import SshTransport
from launcher.transport.ssh_config import find_route
from sshd_inprocess import Sshd, serving
from transport_kit import know, new_key, openssh_to, save_key, sh, ssh_threads, ssh_to
from waiting import stretched


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture
def client() -> paramiko.PKey:
    return new_key()


@pytest.fixture
def key(client: paramiko.PKey, tmp_path: Path) -> Path:
    return save_key(client, tmp_path / "id")


@pytest.fixture
def sshd(home: Path, client: paramiko.PKey) -> Iterator[Sshd]:
    """Yield an SSH server with a known host key, which accepts the key ``client`` and the password ``right``."""
    with serving(Sshd(home=home, host_key=new_key(), authorized=client, password="right")) as server:
        know(home, server.port, server.host_key)
        yield server
    assert ssh_threads() == []


def whoami(transport: RemoteTransport) -> bytes:
    transport.connect(10)
    try:
        return transport.run(Command(("echo", "hello")), timeout=10).stdout
    finally:
        transport.close()


# -- login ---------------------------------------------------------------


def test_password(sshd: Sshd) -> None:
    assert whoami(ssh_to(sshd, password="right")) == b"hello\n"
    assert sshd.logins == ["password ok"]


def test_a_wrong_password_is_tried_once(sshd: Sshd) -> None:
    with pytest.raises(AuthError, match=r"node3 \(ann@127.0.0.1:\d+\): password of ann was not accepted") as caught:
        ssh_to(sshd, password="wrong").connect(10)
    assert sshd.logins == ["password refused"]
    assert sshd.connections == 1
    assert "wrong" not in str(caught.value)


def test_a_wrong_key_names_what_was_tried(sshd: Sshd, tmp_path: Path) -> None:
    other = save_key(new_key(), tmp_path / "other")
    with pytest.raises(AuthError, match="no key was accepted for ann") as caught:
        ssh_to(sshd, key=other).connect(10)
    assert str(other) in str(caught.value)
    assert f"ssh -v -p {sshd.port} ann@127.0.0.1" in str(caught.value)
    assert sshd.connections == 1


def test_a_passphrase_is_never_tried_as_a_password(sshd: Sshd, tmp_path: Path) -> None:
    other = save_key(new_key(), tmp_path / "other", passphrase="right")  # the password of ann, too
    with pytest.raises(AuthError, match="no key was accepted for ann"):
        ssh_to(sshd, key=other, password="right").connect(10)
    assert not any("password" in login for login in sshd.logins)


def test_no_key_at_all(sshd: Sshd, home: Path) -> None:
    with pytest.raises(AuthError, match=f"no ssh-agent, no key in {home}/.ssh"):
        ssh_to(sshd).connect(10)


def test_a_host_without_password_login_reports_the_accepted_methods(home: Path, client: paramiko.PKey) -> None:
    with serving(Sshd(home=home, host_key=new_key(), authorized=client)) as server:
        with pytest.raises(AuthError, match="does not accept a password for ann, only publickey"):
            ssh_to(server, password="right", host_keys="insecure").connect(10)


def test_a_missing_key_file_is_reported_before_connecting(sshd: Sshd, tmp_path: Path) -> None:
    with pytest.raises(AuthError, match=f"key file {tmp_path}/nothere does not exist"):
        ssh_to(sshd, key=tmp_path / "nothere").connect(10)
    assert sshd.connections == 0


def test_a_public_key_in_place_of_the_private_one(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "id.pub").write_text("ssh-ed25519 AAAA someone\n")
    with pytest.raises(AuthError, match="id.pub holds no .* private key .*looks like a public key"):
        ssh_to(sshd, key=tmp_path / "id.pub").connect(10)


def test_an_encrypted_key_without_agent(sshd: Sshd, client: paramiko.PKey, tmp_path: Path) -> None:
    locked = save_key(client, tmp_path / "locked", "opensesame")
    with pytest.raises(AuthError, match=f"key file {locked} is encrypted.*ssh-add"):
        ssh_to(sshd, key=locked).connect(10)
    with pytest.raises(AuthError, match="wrong passphrase"):
        ssh_to(sshd, key=locked, password="no").connect(10)
    assert sshd.connections == 0
    assert whoami(ssh_to(sshd, key=locked, password="opensesame")) == b"hello\n"
    assert sshd.logins == ["key ok"]


# -- host keys -----------------------------------------------------------


def test_an_unknown_host_key_shows_its_fingerprint_and_a_remedy(sshd: Sshd, key: Path, home: Path) -> None:
    (home / ".ssh/known_hosts").unlink()
    with pytest.raises(HostKeyError, match="is not known") as caught:
        ssh_to(sshd, key=key).connect(10)
    assert caught.value.code == "host-key-unknown"
    assert sshd.host_key.fingerprint in str(caught.value)
    assert f"ssh-keyscan -p {sshd.port} 127.0.0.1 >> {home}/.ssh/known_hosts" in str(caught.value)
    assert "host_keys: accept-new" in str(caught.value)
    assert f"`ssh -o StrictHostKeyChecking=ask -p {sshd.port} 127.0.0.1`" in str(caught.value)
    assert "with `ssh-keygen -lf /etc/ssh/ssh_host_ecdsa_key.pub` on the host's console" in str(caught.value)
    assert sshd.logins == []


def test_accept_new_saves_the_key_once(sshd: Sshd, key: Path, home: Path) -> None:
    (home / ".ssh/known_hosts").unlink()
    for mode in ("accept-new", "accept-new", "strict"):
        assert whoami(ssh_to(sshd, key=key, host_keys=mode)) == b"hello\n"  # type: ignore[arg-type]
    assert len((home / ".ssh/known_hosts").read_text().splitlines()) == 1


def test_a_new_key_that_cannot_be_saved_is_refused(sshd: Sshd, key: Path, home: Path) -> None:
    (home / ".ssh/config").write_text("Host *\n  UserKnownHostsFile ~/.ssh/config/known\n")
    with pytest.raises(HostKeyError, match=f"cannot be saved to {home}/.ssh/config/known"):
        ssh_to(sshd, key=key, host_keys="accept-new").connect(10)


def test_known_hosts_file_none_is_not_a_file_name(
    sshd: Sshd, key: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".ssh/config").write_text("Host *\n  UserKnownHostsFile none\n")
    monkeypatch.chdir(tmp_path)
    assert whoami(ssh_to(sshd, key=key, host_keys="accept-new")) == b"hello\n"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("mode", ["strict", "accept-new"])
def test_a_changed_host_key_is_refused(sshd: Sshd, key: Path, home: Path, mode: str) -> None:
    (home / ".ssh/known_hosts").unlink()
    know(home, sshd.port, new_key())
    with pytest.raises(HostKeyError, match="has CHANGED") as caught:
        ssh_to(sshd, key=key, host_keys=mode).connect(10)  # type: ignore[arg-type]
    assert caught.value.code == "host-key-changed"
    assert f"{home}/.ssh/known_hosts:1" in str(caught.value)
    assert f"ssh-keygen -f {home}/.ssh/known_hosts -R '[127.0.0.1]:{sshd.port}'" in str(caught.value)
    # accept-new stores the new key once the old one is gone; strict needs it to be stored
    stored = f"ssh-keyscan -p {sshd.port} 127.0.0.1 >> {home}/.ssh/known_hosts" in str(caught.value)
    assert stored == (mode == "strict")
    assert sshd.logins == []


def test_a_host_behind_an_alias_is_stored_by_a_login(sshd: Sshd, key: Path, home: Path) -> None:
    # ssh-keyscan would store the key under the address, where HostKeyAlias does not look.
    (home / ".ssh/config").write_text("Host 127.0.0.1\n  HostKeyAlias gnn1\n")
    with pytest.raises(HostKeyError, match="host key of gnn1 is not known") as caught:
        ssh_to(sshd, key=key).connect(10)
    assert "keyscan" not in str(caught.value)
    assert f"`ssh -o StrictHostKeyChecking=ask -p {sshd.port} 127.0.0.1`" in str(caught.value)


@pytest.mark.skipif(not shutil.which("ssh-keyscan"), reason="needs the OpenSSH client")
@pytest.mark.parametrize("changed", [False, True])
def test_the_steps_of_a_refused_host_key_let_the_next_login_in(
    sshd: Sshd, key: Path, home: Path, changed: bool
) -> None:
    (home / ".ssh/known_hosts").unlink()
    if changed:
        know(home, sshd.port, new_key())
    with pytest.raises(HostKeyError) as caught:
        ssh_to(sshd, key=key).connect(10)
    steps = [step for step in str(caught.value).split("`")[1::2] if step.startswith(("ssh-keygen -f", "ssh-keyscan"))]
    assert len(steps) == (2 if changed else 1)
    for step in steps:
        subprocess.run(step, shell=True, check=True, capture_output=True)
    assert whoami(ssh_to(sshd, key=key)) == b"hello\n"


@pytest.mark.parametrize("connect", [ssh_to, openssh_to])
@pytest.mark.parametrize("line", ["changed", "revoked"])
@pytest.mark.parametrize("interactive", [False, True])
def test_a_host_with_a_changed_or_revoked_key_gets_no_password(
    sshd: Sshd, key: Path, home: Path, connect: Callable[..., RemoteTransport], line: str, interactive: bool
) -> None:
    # With StrictHostKeyChecking no, login by key is still allowed, as in OpenSSH, because a man in the middle cannot
    # use it elsewhere; a password is not sent.
    (home / ".ssh/config").write_text("Host *\n  StrictHostKeyChecking no\n")
    known = home / ".ssh/known_hosts"
    known.unlink()
    know(home, sshd.port, new_key() if line == "changed" else sshd.host_key)
    known.write_text(known.read_text() if line == "changed" else f"@revoked {known.read_text()}")
    sshd.interactive = interactive
    with pytest.raises(HostKeyError):
        connect(sshd, password="right", host_keys="auto").connect(10)
    assert sshd.logins == []
    assert whoami(connect(sshd, key=key, password="right", host_keys="auto")) == b"hello\n"
    assert "password ok" not in sshd.logins and "interactive ok" not in sshd.logins


def test_insecure_accepts_any_key(sshd: Sshd, key: Path, home: Path) -> None:
    (home / ".ssh/known_hosts").unlink()
    know(home, sshd.port, new_key())
    assert whoami(ssh_to(sshd, key=key, host_keys="insecure")) == b"hello\n"


@pytest.mark.parametrize(
    ("names", "fine"),
    [
        ("[127.0.0.1]:{port}", True),
        ("hashed", True),
        ("127.0.0.1", True),  # as with ssh, a line without the port matches
        ("[127.0.0.*]:*", True),
        ("!127.0.0.1,!\\[127.0.0.1]:{port},*", True),
        ("[127.0.0.*]:*,![127.0.0.1]:{port}", False),
        ("@revoked [127.0.0.1]:{port}", False),
        ("elsewhere", False),
    ],
)
def test_known_hosts_lines(sshd: Sshd, key: Path, home: Path, names: str, fine: bool) -> None:
    if names == "hashed":
        names = HostKeys.hash_host(f"[127.0.0.1]:{sshd.port}")
    line = f"{names.format(port=sshd.port)} {sshd.host_key.get_name()} {sshd.host_key.get_base64()}\n"
    (home / ".ssh/known_hosts").write_text("# comment\nnonsense\n" + line)
    if fine:
        assert whoami(ssh_to(sshd, key=key)) == b"hello\n"
    else:
        with pytest.raises(HostKeyError):
            ssh_to(sshd, key=key).connect(10)


def test_damaged_names_and_other_encodings_in_known_hosts(sshd: Sshd, key: Path, home: Path) -> None:
    known = home / ".ssh/known_hosts"
    lines = b"# B\xfcro\n" + b"".join(
        b"%s ssh-ed25519 AAAA\n" % names for names in (b"|1|abc|x", b"|1|", b"|1|JfKTdBh7rNbXkVAQCRp4OQ==|x=")
    )
    known.write_bytes(lines)
    transport = ssh_to(sshd, key=key, host_keys="accept-new")
    transport.connect(5)
    transport.close()
    assert known.read_bytes().startswith(lines) and len(known.read_bytes().splitlines()) == 5


@pytest.mark.parametrize("size", [0, 30, 70, 168, 300])
def test_a_key_file_that_was_cut_off_holds_no_key(tmp_path: Path, size: int) -> None:
    path = tmp_path / "id"
    key = ed25519.Ed25519PrivateKey.generate()
    whole = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    path.write_bytes(whole[:size])
    problem = key_problem(str(path), None, "")
    assert problem is not None and "holds no RSA, ECDSA or Ed25519 private key" in problem[1]


def test_a_certificate_that_was_cut_off_is_not_offered(sshd: Sshd, key: Path) -> None:
    kind = b"ssh-rsa-cert-v01@openssh.com"
    content = base64.b64encode(len(kind).to_bytes(4, "big") + kind)
    key.with_name(f"{key.name}-cert.pub").write_bytes(kind + b" " + content + b"\n")
    assert whoami(ssh_to(sshd, key=key)) == b"hello\n"


def test_invalid_lines_in_known_hosts_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "known").write_text("h ssh-ed25519 !!!\n@cert-authority * ssh-rsa AAAA\nh ssh-ed25519 AAAA\n")
    lines = list(read_known_hosts([tmp_path / "known"]))
    assert [(line.where, line.authority) for line in lines] == [
        (f"{tmp_path}/known:2", True), (f"{tmp_path}/known:3", False),
    ]  # fmt: skip


# -- connecting ------------------------------------------------------------


def test_a_closed_port(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"connection refused on port {port} – check that sshd runs"):
        ssh_to(port, password="x").connect(5)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "gpu1..lan"])
def test_a_name_that_does_not_resolve(home: Path, name: str) -> None:
    node = NodeConfig(host=name)
    with pytest.raises(UnreachableError, match=f"name {name} cannot be resolved"):
        SshTransport(node, "strict", Credentials(), 0).connect(5)


def test_a_port_where_something_else_listens(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="no SSH server answers there"):
            ssh_to(silent.getsockname()[1], password="x").connect(1)
        assert time.monotonic() - started < stretched(5)


def test_libraries_print_nothing_to_the_terminal(home: Path) -> None:
    script = (
        "import socket, transport_kit\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "try: transport_kit.ssh_to(server.getsockname()[1], password='x').connect(1)\n"
        "except Exception as error: print(type(error).__name__)"
    )
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (b"UnreachableError\n", b"")


def test_a_busy_sshd_that_drops_connections_is_retried(sshd: Sshd, key: Path) -> None:
    sshd.hang_up = 2
    assert whoami(ssh_to(sshd, key=key)) == b"hello\n"
    assert (sshd.connections, sshd.logins) == (3, ["key ok"])


def test_an_sshd_that_drops_all_connections_is_an_error(sshd: Sshd, key: Path) -> None:
    sshd.hang_up = 1000
    with pytest.raises(UnreachableError, match="closed it before login.*MaxStartups"):
        ssh_to(sshd, key=key).connect(1)
    assert sshd.logins == []


# -- lost connections -----------------------------------------------------


def test_a_connection_lost_during_a_command_can_be_reopened(sshd: Sshd, key: Path) -> None:
    transport = ssh_to(sshd, key=key)
    transport.connect(10)
    threading.Timer(0.3, sshd.drop).start()
    started = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"node3 \(ann@127.0.0.1:\d+\): connection lost"):
        transport.run(sh("sleep 60"), timeout=60)
    assert time.monotonic() - started < stretched(5)
    with pytest.raises(ConnectionLost):
        transport.run(sh("true"), timeout=5)
    assert whoami(transport) == b"hello\n"


def test_a_connection_lost_during_a_stream(sshd: Sshd, key: Path) -> None:
    transport = ssh_to(sshd, key=key)
    transport.connect(10)
    lines: list[str] = []
    threading.Timer(0.3, sshd.drop).start()
    with pytest.raises(ConnectionLost):
        transport.stream(sh("echo one; sleep 60"), lines.append, threading.Event())
    assert lines == ["one"]
    transport.close()


def test_an_interrupted_upload_resumes(sshd: Sshd, key: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(2_000_000))
    transport = ssh_to(sshd, key=key)
    transport.connect(10)
    sshd.drop_after = 1_000_000
    with pytest.raises(ConnectionLost):
        transport.upload(tmp_path / "big", "~/big")
    sshd.drop_after = None
    arrived = (home / "big").stat().st_size
    assert 0 < arrived < 2_000_000
    transport.connect(10)
    transport.upload(tmp_path / "big", "~/big", offset=arrived)
    transport.close()
    assert (home / "big").read_bytes() == (tmp_path / "big").read_bytes()


def test_one_connection_serves_everything(sshd: Sshd, key: Path, tmp_path: Path) -> None:
    transport = ssh_to(sshd, key=key)
    transport.connect(10)
    transport.connect(10)
    transport.write(b"x", "~/x")
    transport.download("~/x", tmp_path / "x")
    transport.run(sh("true"), timeout=10)
    transport.close()
    assert sshd.connections == 1


# -- ~/.ssh/config -------------------------------------------------------


def test_an_alias_with_everything_in_an_included_file(sshd: Sshd, key: Path, home: Path) -> None:
    folder = home / ".ssh/conf.d"  # absolute, since ssh takes ~ from /etc/passwd
    (home / ".ssh/config").write_text(f"Include {folder}/*\nHost other\n  User nobody\nHost *\n  User wrong\n")
    folder.mkdir()
    (folder / "gpu").write_text(
        f"Host gpu\n HostName 127.0.0.1\n Port {sshd.port}\n User ann\n HostKeyAlias gpubox\n"
        f" UserKnownHostsFile ~/.ssh/gpu_hosts\n IdentityFile ~/.ssh/missing\n IdentityFile {key}\n"
    )
    line = f"gpubox {sshd.host_key.get_name()} {sshd.host_key.get_base64()}\n"
    (home / ".ssh/gpu_hosts").write_text(line)
    transport = SshTransport(NodeConfig(host="gpu"), "strict", Credentials(), 0)
    assert whoami(transport) == b"hello\n"
    assert transport.target == f"ann@127.0.0.1:{sshd.port}"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="openssh-client is not installed")
@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ("Host gnn1\n HostName a\nHost gnn2\n HostName b\nHost gnn3\n User eve\nHost !gnn4 *\n User ann\n", 3),
        ("User ann\nHost *\n HostName %h.lab\n", 4),
        ("Host gnn1\n Include {home}/more\nHost *\n User ann\n", 4),
        ("Match originalhost gnn1 exec true\n User eve\n", 4),
        ("", 1),
    ],
)
def test_ssh_is_run_once_for_hosts_with_the_same_config_lines(
    home: Path, monkeypatch: pytest.MonkeyPatch, config: str, asked: int
) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh/config").write_text(config.format(home=home))
    (home / "more").write_text("Host gnn1 gnn2\n  User eve\n")
    names: list[str] = []
    ask = ssh_config._by_openssh

    def counted(name: str, user: str | None, port: int | None) -> ssh_config.Options:
        names.append(name)
        return ask(name, user, port)

    monkeypatch.setattr(ssh_config, "_by_openssh", counted)
    found = {name: find_route(name)[-1].target for name in ("gnn1", "gnn2", "gnn3", "gnn4")}
    assert len(names) == asked
    for name, target in found.items():
        options = ask(name, None, None)
        assert target == f"{options['user'][0]}@{options['hostname'][0]}"


def test_without_an_openssh_client_the_config_files_are_parsed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (home / ".ssh").mkdir()
    (home / ".ssh/config").write_text("Include more\nHost *\n  User ann\n  ProxyJump eve@door:2222\n")
    (home / ".ssh/more").write_text("Host gnn1\n  HostName %h.lab\n  IdentityFile ~/%r\n")
    door, node = find_route("gnn1")
    assert (door.target, node.target) == ("eve@door:2222", "ann@gnn1.lab")
    assert node.identity_files == (f"{home}/ann",)
    assert door.known_hosts[0] == home / ".ssh/known_hosts"


def test_a_login_that_does_not_end_ends_with_its_proxy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = home / "ssh"
    script = '#!/bin/bash\nfor word; do [ "$word" = -G ] && exec %s "$@"; done\nsleep 60 >/dev/null & wait\n'
    program.write_text(script % shutil.which("ssh"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    transport = openssh.OpenSshTransport(NodeConfig(host="gnn1", user="ann"), "accept-new", Credentials(None))
    since = time.monotonic()
    with pytest.raises(UnreachableError, match="no answer within 1 s"):
        transport.connect(1.0)
    assert time.monotonic() - since < stretched(20)


def test_a_proxy_that_ignores_sigterm_is_killed(home: Path) -> None:
    (home / ".ssh").mkdir()
    command = "bash -c 'trap : TERM; echo up; sleep 60'"
    (home / ".ssh/config").write_text(f"Host gnn1\n  ProxyCommand {command}\n")
    since = time.monotonic()
    with ssh_module._socket(find_route("gnn1")[-1], 1.0) as sock:
        assert sock.recv(2) == b"up"
    assert time.monotonic() - since < stretched(20)


def test_an_invalid_ssh_config_is_named(sshd: Sshd, home: Path) -> None:
    (home / ".ssh/config").write_text("Host x\nnonsense\n")
    with pytest.raises(TransportError, match="~/.ssh/config cannot be used"):
        ssh_to(sshd, password="right").connect(5)


# -- all nodes -----------------------------------------------------------


def cluster(*nodes: NodeConfig) -> ClusterConfig:
    return ClusterConfig(nodes=nodes, data=DataConfig(dataset="synthetic"))


def test_connect_all_reports_every_node(sshd: Sshd, key: Path) -> None:
    good = NodeConfig(host="127.0.0.1", port=sshd.port, user="ann", key=str(key))
    config = cluster(good, NodeConfig(host="a.invalid"), NodeConfig(host="127.0.0.1", port=1, user="ann"), good)
    results = connect_all(config)
    assert [type(results[k]).__name__ for k in range(4)] == [
        "SshTransport", "UnreachableError", "UnreachableError", "SshTransport",
    ]  # fmt: skip
    assert str(results[2]).startswith("node2 (ann@127.0.0.1:1): connection refused")
    close_all(results)


def test_a_control_master_that_hangs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After a network cut, ssh -O check may wait for a master that does not answer.
    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(openssh, "_CHECK_TIMEOUT", 0.3)
    transport = openssh.OpenSshTransport(NodeConfig("gnn1"), "strict", Credentials(None))
    assert not transport._use_control_master() and not transport._alive()
