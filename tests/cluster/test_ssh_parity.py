"""Tests that gnnfleet can log in exactly where plain ``ssh HOST`` can, for many configs of the ssh client and of
sshd."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import parity_driver
from netns import REPOSITORY, Host, NetCluster

#: Port -> sshd_config of the sshd that listens there on the target host; {dir} is a folder with keys.
SERVERS = {
    2201: "HostKey {dir}/host\nHostCertificate {dir}/host-cert.pub\n",
    2202: "HostKey {dir}/host\nTrustedUserCAKeys {dir}/ca.pub\nAuthorizedKeysFile none\n",
    2203: "HostKey {dir}/host\nPubkeyAuthentication no\nPasswordAuthentication yes\n",
    2204: "HostKey {dir}/host\nAuthenticationMethods publickey,publickey\n",
    2205: "HostKey {dir}/host\nMaxAuthTries 3\n",
    2206: "HostKey {dir}/host\nHostKey {dir}/host_rsa\n",
    2207: "HostKey {dir}/host\nKexAlgorithms diffie-hellman-group18-sha512\nMACs umac-128-etm@openssh.com\n"
    "Ciphers chacha20-poly1305@openssh.com\n",
    2208: "HostKey {dir}/host\nPubkeyAcceptedAlgorithms rsa-sha2-512\n",
    2209: "HostKey {dir}/host\nAuthenticationMethods publickey,password\nPasswordAuthentication yes\n",
    2210: "HostKey {dir}/host\nDenyUsers root\n",
}
KEYS = ("host", "host_rsa", "ca", "good", "second", "rsa", "locked", "stranger", *(f"other{k}" for k in range(8)))
PASSPHRASE = "open sesame"


@dataclass(frozen=True)
class Variant:
    """One case: files of the operator's ~/.ssh, and whether ``ssh`` can log in with them."""

    name: str
    config: str
    works: bool = True
    keys: dict[str, str] = field(default_factory=lambda: {"id_ed25519": "good"})
    known: str = "{known}"
    files: dict[str, str] = field(default_factory=dict)
    agent: tuple[str, ...] = ()
    hidden_agent: bool = False
    env: dict[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    by: str = "paramiko"  #: the client that gnnfleet should log in with
    host: str = "node"


def at(port: int = 22, more: str = "") -> str:
    return f"Host node\n  HostName {{address}}\n  Port {port}\n{more}"


NO_KEYS: dict[str, str] = {}
JUMP = "Host bastion\n  HostName {bastion}\n"

VARIANTS = [
    Variant("alias and usual key", at()),
    Variant("address alone", "", host="{address}"),
    Variant("no key", at(), works=False, keys=NO_KEYS),
    Variant("wrong port", at(2299), works=False),
    Variant("host named by token", "Host node\n  HostName real-%h\n"),
    Variant("Match exec", "Match originalhost node exec \"test -d /\"\n  HostName {address}\n"),
    Variant("Match exec that fails", "Match originalhost node exec \"test -d /nothing\"\n  HostName {address}\n",
            works=False),
    Variant("Match user and localuser", "Match localuser root user root\n  HostName {address}\n"),
    Variant("canonical name", "CanonicalizeHostname yes\nCanonicalDomains lab\nHost node.lab\n  Port 2206\n"),
    Variant("Match canonical", "CanonicalizeHostname yes\nCanonicalDomains lab\n"
            "Match canonical host *.lab\n  Port 2299\n", works=False),
    Variant("first value wins", at() + "Host *\n  Port 2299\n  HostName nowhere\n"),
    Variant("Include with a pattern", "Include parts/*\n", files={"parts/a": at()}),
    Variant("quoted values", at(more='  IdentityFile "~/.ssh/my key"\n'), keys={"my key": "good"}),
    Variant("comment behind a value", "Host node\n  HostName {address}\n  Port 22 # the usual\n"),
    Variant("unknown keyword", at(more="  Nonsense yes\n"), works=False),
    Variant("IgnoreUnknown", "IgnoreUnknown Nonsense\n" + at(more="  Nonsense yes\n")),
    # keys
    Variant("several keys, some missing, some wrong", at(more="  IdentityFile ~/.ssh/none\n  IdentityFile ~/.ssh/a\n"
            "  IdentityFile ~/.ssh/b\n"), keys={"a": "other0", "b": "good"}),
    Variant("key named by tokens", at(more="  IdentityFile %d/.ssh/${{WHICH}}-%r-%n\n"), keys={"my-root-node": "good"},
            env={"WHICH": "my"}),
    Variant("IdentityFile none", at(more="  IdentityFile none\n"), works=False),
    Variant("locked key, nobody to ask", at(), works=False, keys={"id_ed25519": "locked"}),
    Variant("agent alone", at(), keys={"k": "good"}, agent=("k",)),
    Variant("locked key in the agent, IdentitiesOnly", at(more="  IdentitiesOnly yes\n  IdentityFile ~/.ssh/locked\n"),
            keys={"k": "good", "locked": "locked"}, agent=("k",), works=False),
    Variant("IdentityAgent", at(more="  IdentityAgent ~/.ssh/agent\n"), keys={"k": "good"}, agent=("k",),
            hidden_agent=True),
    Variant("IdentityAgent none", at(more="  IdentityAgent none\n"), works=False, keys={"k": "good"}, agent=("k",)),
    Variant("more agent keys than the host takes", at(2205), works=False, keys={f"o{k}": f"other{k}" for k in range(6)}
            | {"k": "good"}, agent=(*(f"o{k}" for k in range(6)), "k")),
    Variant("the right one of many agent keys", at(2205, "  IdentitiesOnly yes\n  IdentityFile ~/.ssh/good.pub\n"),
            keys={f"o{k}": f"other{k}" for k in range(6)} | {"k": "good"}, agent=(*(f"o{k}" for k in range(6)), "k"),
            files={"good.pub": "{good.pub}"}),
    Variant("named agent key goes first", at(2205, "  IdentityFile ~/.ssh/good.pub\n"),
            keys={f"o{k}": f"other{k}" for k in range(6)} | {"k": "good"}, agent=(*(f"o{k}" for k in range(6)), "k"),
            files={"good.pub": "{good.pub}"}),
    Variant("RSA key for SHA-2 only", at(2208), keys={"id_rsa": "rsa"}),
    Variant("key of a refused type", at(2208), works=False),
    Variant("PubkeyAuthentication no", at(more="  PubkeyAuthentication no\n"), works=False),
    Variant("PreferredAuthentications", at(more="  PreferredAuthentications password\n"), works=False),
    Variant("two keys wanted", at(2204, "  IdentityFile ~/.ssh/a\n  IdentityFile ~/.ssh/b\n"),
            keys={"a": "good", "b": "second"}),
    Variant("key and password wanted", at(2209), works=False),
    Variant("password host", at(2203), works=False),
    Variant("user denied", at(2210), works=False),
    Variant("another user", at(2210, "  User worker\n")),
    # certificates
    Variant("certificate beside the key", at(2202), files={"id_ed25519-cert.pub": "{good-cert.pub}"}),
    Variant("CertificateFile", at(2202, "  CertificateFile ~/.ssh/c.pub\n"), files={"c.pub": "{good-cert.pub}"}),
    Variant("certificate in the agent", at(2202), keys={"k": "good"}, files={"k-cert.pub": "{good-cert.pub}"},
            agent=("k",)),
    Variant("CertificateFile, key in the agent", at(2202, "  CertificateFile ~/.ssh/c.pub\n"), keys={"k": "good"},
            files={"c.pub": "{good-cert.pub}"}, agent=("k",)),
    Variant("certificate wanted", at(2202), works=False),
    # host keys
    Variant("unknown host", at(), works=False, known=""),
    Variant("changed host key", at(), works=False, known="{address} {stranger.pub}"),
    Variant("accept-new", at(more="  StrictHostKeyChecking accept-new\n"), known=""),
    Variant("accept-new, changed", at(more="  StrictHostKeyChecking accept-new\n"), works=False,
            known="{address} {stranger.pub}"),
    Variant("StrictHostKeyChecking no, changed", at(more="  StrictHostKeyChecking no\n"),
            known="{address} {stranger.pub}"),
    Variant("revoked host key", at(), works=False, known="@revoked {address} {host22.pub}\n{known}"),
    Variant("HostKeyAlias", at(more="  HostKeyAlias box\n"), known="box {host22.pub}"),
    Variant("hashed, with port", at(2206), known="{hashed}"),
    Variant("known without the port", at(2206), known="{address} {host.pub}"),
    Variant("only the RSA key is known", at(2206), known="[{address}]:2206 {host_rsa.pub}"),
    Variant("two files of known hosts", at(more="  UserKnownHostsFile ~/.ssh/a ~/.ssh/b\n"), known="",
            files={"a": "", "b": "{known}"}),
    Variant("known to the system", at(more="  GlobalKnownHostsFile ~/.ssh/all\n"), known="", files={"all": "{known}"}),
    Variant("KnownHostsCommand", at(more="  KnownHostsCommand /bin/cat {home}/.ssh/all\n"), known="",
            files={"all": "{known}"}, by="ssh"),
    Variant("host certificate", at(2201), known="@cert-authority [{address}]:2201 {ca.pub}", by="ssh"),
    Variant("host certificate, wrong authority", at(2201), works=False,
            known="@cert-authority [{address}]:2201 {stranger.pub}"),
    # routes
    Variant("ProxyJump", JUMP + at(more="  ProxyJump bastion\n")),
    Variant("two jump hosts", JUMP + "Host inner\n  HostName {address}\n  Port 2206\n" + at(
            more="  ProxyJump bastion,inner\n")),
    Variant("jump host with a jump host", JUMP + "Host inner\n  HostName {address}\n  ProxyJump bastion\n" + at(
            more="  ProxyJump root@inner:2206\n")),
    Variant("ProxyJump none", "Host node\n  ProxyJump none\n" + JUMP + at() + "Host *\n  ProxyJump nowhere\n"),
    Variant("unknown jump host", JUMP + at(more="  ProxyJump bastion\n"), works=False, known="{address} {host22.pub}"),
    Variant("ssh -W as ProxyCommand", JUMP + at(more="  ProxyCommand ssh -q -W %h:%p bastion\n")),
    Variant("ProxyCommand", at(more="  ProxyCommand {python} {tube} %h %p\n")),
    Variant("ProxyCommand that ends", at(more="  ProxyCommand true\n"), works=False),
    Variant("ProxyUseFdpass", at(more="  ProxyUseFdpass yes\n  ProxyCommand {python} {tube} --pass %h %p\n"), by="ssh"),
    Variant("BindAddress", at(more="  BindAddress {operator}\n")),
    Variant("BindAddress of another", at(more="  BindAddress 192.0.2.1\n"), works=False),
    Variant("AddressFamily", at(more="  AddressFamily inet\n")),
    Variant("AddressFamily of another", at(more="  AddressFamily inet6\n"), works=False),
    Variant("algorithms paramiko lacks", at(2207), by="ssh"),
    Variant("a line the user keeps open", at(more="  ControlPath ~/.ssh/%C\n"), by="ssh",
            before="ssh -M -N -f node && rm ~/.ssh/id*", after="ssh -O exit node"),
    Variant("everything a laptop has", at(more="  Compression yes\n  ForwardAgent yes\n  ServerAliveInterval 30\n"
            "  SendEnv LANG\n  GSSAPIAuthentication yes\n  AddKeysToAgent yes\n  ConnectTimeout 5\n")),
]  # fmt: skip

TUBE = """import array, socket, sys, threading
sock = socket.create_connection((sys.argv[-2], int(sys.argv[-1])))
if sys.argv[1] == "--pass":
    line = socket.socket(fileno=1)
    line.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))])
    sys.exit()
def back():
    while data := sock.recv(65536):
        sys.stdout.buffer.raw.write(data)
threading.Thread(target=back, daemon=True).start()
while data := sys.stdin.buffer.raw.read(65536):
    sock.sendall(data)
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in KEYS:
        kind = ["-t", "rsa", "-b", "2048"] if "rsa" in name else ["-t", "ed25519"]
        phrase = PASSPHRASE if name == "locked" else ""
        keygen("-q", *kind, "-N", phrase, "-C", name, "-f", str(folder / name))
    keygen("-q", "-s", str(folder / "ca"), "-I", "me", "-n", "root", str(folder / "good.pub"))
    return folder


@pytest.fixture(scope="module")
def answers(keys: Path) -> Iterator[dict[str, dict[str, object]]]:
    """Yield the results of ``ssh`` and of gnnfleet, by name of the variant."""
    # host 0 is the operator's, host 1 the jump host, host 2 the target
    with NetCluster(3) as cluster:
        operator, bastion, target = cluster.hosts
        serve(target, keys, [bastion])
        names = operator.root_path("/etc/hosts")
        names.write_text(names.read_text() + f"{target.address} real-node node.lab node.lab.\n")
        operator.write("~/tube.py", TUBE)
        values = substitutions(cluster, keys)
        variants = [as_json(variant, values, keys) for variant in VARIANTS]
        # into files: a child that outlives the driver would keep a pipe open
        driver = f"PYTHONPATH={REPOSITORY} {sys.executable} {parity_driver.__file__} >~/answers 2>~/errors"
        done = operator.run(["sh", "-c", driver], stdin=json.dumps(variants), timeout=280, check=False)
        assert done.returncode == 0, operator.root_path("~/errors").read_text()
        lines = operator.root_path("~/answers").read_text().splitlines()
        yield {answer["name"]: answer for answer in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_gnnfleet_logs_in_where_ssh_does(answers: dict[str, dict[str, object]], variant: Variant) -> None:
    answer = answers[variant.name]
    assert answer["ssh"] == variant.works, answer["said"]
    assert answer["ours"] == answer["ssh"], answer["error"] or answer["said"]
    assert answer["by"] == (variant.by if variant.works else "")


def serve(target: Host, keys: Path, others: list[Host]) -> None:
    """Start an sshd on the target for each entry of SERVERS, and install the accepted keys."""
    folder = target.root_path("~/sshd")
    folder.mkdir()
    keygen("-q", "-s", str(keys / "ca"), "-I", "it", "-h", "-n", target.address, str(keys / "host.pub"))
    for path in keys.iterdir():
        shutil.copy(path, folder / path.name)
    allowed = "".join((keys / f"{name}.pub").read_text() for name in ("good", "second", "rsa"))
    for host in (target, *others):
        host.write("~/.ssh/authorized_keys", allowed)
    common = "PasswordAuthentication no\nStrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    for port, text in SERVERS.items():
        config = text.format(dir=f"{target.home}/sshd") + common + f"Port {port}\n"
        target.write(f"~/sshd/{port}", config)
        target.run(["/usr/sbin/sshd", "-f", f"{target.home}/sshd/{port}"])


def substitutions(cluster: NetCluster, keys: Path) -> dict[str, str]:
    """Return the values of placeholders such as ``{address}`` in the texts of variants."""
    operator, bastion, target = cluster.hosts
    public = {path.name: path.read_text().strip() for path in keys.glob("*.pub")}
    public["host22.pub"] = (target.folder / "etc/host_key.pub").read_text().strip()
    ports = "".join(f"[{target.address}]:{port} {public['host.pub']}\n" for port in SERVERS)
    jump = f"{bastion.address} {(bastion.folder / 'etc/host_key.pub').read_text().strip()}\n"
    names = f"{target.address},real-node,node.lab"
    known = f"{names} {public['host22.pub']}\n[node.lab]:2206 {public['host.pub']}\n{ports}{jump}"
    plain = keys / "plain"
    plain.write_text(f"[{target.address}]:2206 {public['host.pub']}\n")
    keygen("-q", "-H", "-f", str(plain))
    addresses = {"address": target.address, "bastion": bastion.address, "operator": operator.address}
    programs = {"python": sys.executable, "tube": f"{operator.home}/tube.py", "home": operator.home}
    return public | addresses | programs | {"known": known, "hashed": plain.read_text()}


def as_json(variant: Variant, values: dict[str, str], keys: Path) -> dict[str, object]:
    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        return text.replace("{{", "{").replace("}}", "}")

    files = {"config": filled(variant.config), "known_hosts": filled(variant.known)}
    files |= {name: filled(text) for name, text in variant.files.items()}
    files |= {name: (keys / key).read_text() for name, key in variant.keys.items()}
    names = ("name", "hidden_agent", "env", "before", "after")
    plain = {name: getattr(variant, name) for name in names}
    return plain | {"files": files, "agent": list(variant.agent), "host": filled(variant.host)}


def keygen(*words: str) -> None:
    done = subprocess.run(["ssh-keygen", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
