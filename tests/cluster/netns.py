"""Creates several SSH hosts on one machine, for tests and benchmarks.

::

    with NetCluster(3) as cluster:
        cluster.hosts[0].run(["hostname"]).stdout
        subprocess.run(["ssh", "-F", cluster.operator_ssh_config, cluster.hosts[1].name, "true"])

Each host has a network, pid, mount and UTS namespace of its own: an address on a bridge, a
real ``sshd`` on port 22, its own /tmp, /run, /dev/shm, home folder, host key, hostname and
/etc/hosts (with the host's own name on 127.0.1.1, as Debian installs it). All hosts see the
same /usr and the same repository and virtual environment, but share no folder for data unless
``shared_folder`` is set. The operator's processes run outside of all hosts and reach the hosts
over the bridge.

Needs root and Linux; ``unavailable()`` returns what is missing. Uses only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from netns_tools import (
    FIRST_UID,
    SEARCH_PATH,
    STATE,
    Machine,
    MemoryCgroup,
    NetnsError,
    Process,
    free_prefix,
    ip,
    keygen,
    kill_namespace,
    processes_of,
    public_key,
    remove_leftovers,
    start_ticks,
    state,
    tool,
    unavailable,
)

__all__ = ["Host", "Machine", "NetCluster", "NetnsError", "Process", "remove_leftovers", "unavailable"]

REPOSITORY = Path(__file__).resolve().parents[2]
OWN = ("/tmp", "/run", "/dev/shm")
HOMES = "/run/home"  # of ``Machine.users``
DISK = "/tmp/gnnfleet"  # a folder of every host that survives a power cut; its path contains no cluster's name
BRIDGE_MAC = (
    "02:00:00:00:00:01"  # fixed: a bridge takes over the MAC of some host, and another one after that host's power-off
)
PASSWORD = "correct-horse-9"  # password of root and PASSWORD_USER on hosts made with password=True
PASSWORD_HASH = "$6$gnnfleet$FlffmUHd8jMB5CKYvAOydeqTZ7F3umb87lM.c5Ncj4IHPUIzRpEmm7D7gtgJtNGHzGI6C06R8pYVBocfx9FuS1"
PASSWORD_USER = "worker"
DIRECTORY_USER = "alice@corp"  # a user name as a directory service gives it
_serial = itertools.count()


class Host:
    """One host of the cluster.

    ``home`` is a path on the host; ``root_path`` converts it to the path of the same folder outside of the host.
    """

    def __init__(self, cluster: NetCluster, index: int, machine: Machine):
        self.cluster, self.index, self.machine = cluster, index, machine
        self.memory = MemoryCgroup(f"{cluster.name}h{index}") if machine.own_memory else None
        self.name = f"{cluster.name}h{index}"
        self.address = f"{cluster.prefix}.{10 + index}"
        self.mac = "02:00:" + ":".join(f"{byte:02x}" for byte in socket.inet_aton(self.address))
        self.home = str(cluster.folder / "home")
        self.folder = cluster.folder / f"h{index}"  # bind-mounted over cluster.folder on this host
        self.init_pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._hidden: list[str] = []
        self._slow = False

    # --- power ------------------------------------------------------------------------

    def prepare(self) -> None:
        for name in ("etc", "home/.ssh", "keep", "disk"):
            (self.folder / name).mkdir(parents=True, mode=0o700, exist_ok=True)
        keygen(self.folder / "etc/host_key", self.name)
        key = self.machine.authorized or self.cluster.identity.with_suffix(".pub")
        shutil.copy(key, self.folder / "home/.ssh/authorized_keys")
        for name, text in self._etc().items():
            (self.folder / "etc" / name).write_text(text)
        (self.folder / "etc/shadow").chmod(0o600)

    def _etc(self) -> dict[str, str]:
        password = PASSWORD_HASH if self._takes_password else "*"
        users = ("root", PASSWORD_USER, DIRECTORY_USER)
        accounts = [f"{user}:x:0:0::{self.home}:{self.machine.shell}" for user in users]
        shadow = [f"{user}:{password}:19000:0:99999:7:::" for user in users]
        for uid, user in enumerate(self.machine.users, FIRST_UID):
            accounts.append(f"{user}:x:{uid}:{uid}::{HOMES}/{user}:{self.machine.shell}")
            shadow.append(f"{user}:*:19000:0:99999:7:::")
        accounts += [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        shadow += [line for line in Path("/etc/shadow").read_text().splitlines() if not line.startswith("root:")]
        others = [f"{host.address} {host.name}" for host in self.cluster.hosts if host is not self]
        hosts = ["127.0.0.1 localhost", f"127.0.1.1 {self.name}", *others]
        texts = {"passwd": accounts, "shadow": shadow, "hosts": hosts, "hostname": [self.name]}
        return {name: "\n".join(lines) + "\n" for name, lines in texts.items()} | {"sshd_config": self._sshd_config()}

    @property
    def _takes_password(self) -> bool:
        return self.cluster.password or self.machine.password

    def _sshd_config(self) -> str:
        options = {
            "HostKey": str(self.cluster.folder / "etc/host_key"),
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "yes" if self._takes_password else "no",
            "StrictModes": "no",
            "UsePAM": "no",
            "UseDNS": "no",
            "PidFile": "none",
            "Subsystem": "sftp internal-sftp",
            **self.cluster.sshd_options,
            **self.machine.sshd,
        }
        return "".join(f"{name} {value}\n" for name, value in options.items())

    def power_on(self) -> None:
        """Begin to boot the host. Call ``wait_until_up`` to wait for the end of the boot."""
        link, mac = self.name, self.mac
        ip(f"netns add {self.name}")
        inside = self.machine.interface
        ip(f"link add {link} type veth peer name {inside} address {mac} netns {self.name}")
        ip(f"-n {self.name} addr add {self.address}/24 dev {inside}")
        ip(f"-n {self.name} link set lo up")
        ip(f"-n {self.name} link set {inside} up")
        if self.machine.behind is not None:  # drops every answer to the operator
            ip(f"-n {self.name} route add blackhole {self.cluster.prefix}.1/32")
        ip(f"link set {link} master {self.cluster.bridge} up")
        if self.memory:
            self.memory.make()
        with open(self.folder / "console.log", "ab") as console:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "-m", "-p", "-u", "-f", "--kill-child"]
                + ["bash", "-c", self._init_script()],
                env={"PATH": SEARCH_PATH, "HOME": self.home},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def _init_script(self) -> str:
        """Return the script that runs as pid 1 of the host: it mounts file systems, starts sshd and reaps orphans."""
        quote, folder = shlex.quote, self.cluster.folder
        kept = [(quote(str(path)), quote(f"{self.folder}/keep/{k}")) for k, path in enumerate(self.cluster.kept())]
        lines = ["set -e", f"hostname {self.name}", "mount -t proc proc /proc"]
        lines += [*self.memory.mounts, f"echo 0 > {self.memory.processes}"] if self.memory else []
        lines += [f"mkdir -p {place}; mount --rbind {path} {place}" for path, place in kept]
        lines += [f"mount -t tmpfs -o mode={'755' if own == '/run' else '1777'} tmpfs {own}" for own in OWN]
        lines += [f"mkdir -p {path}; mount --move {place} {path}" for path, place in kept]
        lines += [f"mount --bind {self.folder}/etc/{name} /etc/{name}" for name in ("passwd", "shadow", "hosts")]
        lines += [f"mkdir {DISK}; mount --bind {self.folder}/disk {DISK}"]
        lines += [f"mount --rbind {self.folder} {folder}", "mkdir -p /run/sshd", "cd /"]
        return "\n".join([*lines, f"/usr/sbin/sshd -D -e -f {folder}/etc/sshd_config &", "wait"])

    def wait_until_up(self, timeout: float = 120.0) -> None:
        """Wait until sshd answers. On timeout, raise ``NetnsError`` with the end of the console output."""
        deadline = time.monotonic() + timeout
        while not self._answers():
            dead = self._process is None or self._process.poll() is not None
            if dead or time.monotonic() > deadline:
                console = (self.folder / "console.log").read_text(errors="replace")[-2000:]
                raise NetnsError(f"{self.name} did not come up:\n{console}")
            time.sleep(0.02)
        self.init_pid = self._find_init()
        hidden, self._hidden = self._hidden, []
        for path in hidden:
            self.hide(path)

    def _answers(self) -> bool:
        if self.machine.behind is not None:
            return ":0016 " in ip(f"netns exec {self.name} cat /proc/net/tcp", check=False)
        with contextlib.suppress(OSError), socket.create_connection((self.address, 22), timeout=1.0) as line:
            return line.recv(4) == b"SSH-"
        return False

    def _find_init(self) -> int:
        assert self._process is not None
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def welcome(self) -> None:
        """Make the home folders of ``Machine.users``, and let them use the repository, its Python and the kernels."""
        key = f"{self.home}/.ssh/authorized_keys"
        lines = ["set -e"]
        for path in (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix).resolve()):
            closed = next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None)
            if closed is not None:  # such as /root; only ``path`` remains of it
                lines += ["mkdir -p /run/moved", f"mount --rbind {path} /run/moved"]
                lines += [f"mount -t tmpfs -o mode=755 tmpfs {closed}", f"mkdir -p {path}"]
                lines += [f"mount --move /run/moved {path}"]
        for uid, user in enumerate(self.machine.users, FIRST_UID):
            home = f"{HOMES}/{user}"
            lines += [f"mkdir -p {home}/.ssh", f"cp {key} {home}/.ssh/authorized_keys"]
            lines += [f"cp -r {os.environ['GNNFLEET_KERNELS']} {home}/kernels", f"chown -R {uid}:{uid} {home}"]
        self.run(["bash", "-c", "\n".join(lines)])

    def power_cut(self) -> None:
        """Stop the host as by a power failure: other hosts get no TCP FIN. /tmp is lost, the home folder stays."""
        self.cut_network()
        self.destroy()

    def destroy(self) -> None:
        """Kill all processes on the host and remove its network interface. May be called twice."""
        if self._process is not None:
            self._process.kill()  # --kill-child kills pid 1, and with it all processes of the host
            self._process.wait()
            self._process = None
        kill_namespace(self.name)
        while self.init_pid and state(self.init_pid) not in ("", "Z"):
            time.sleep(0.005)
        self.init_pid = 0
        ip(f"link del {self.name}", check=False)
        ip(f"netns del {self.name}", check=False)
        if self.memory:
            self.memory.remove()

    # --- use --------------------------------------------------------------------------

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout: float = 120.0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self.init_pid), "-m", "-u", "-p", "-n", "-r"]
        done = subprocess.run(
            [*enter, "--", "env", "-C", self.home, *argv],
            env={"PATH": SEARCH_PATH, "HOME": self.home},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise NetnsError(f"{self.name}: {shlex.join(argv)} exited {done.returncode}: {done.stderr.strip()}")
        return done

    def root_path(self, path: str | Path) -> Path:
        """Convert a path on this host to the path of the same file on the test machine."""
        text = str(path)
        absolute = self.home + text[1:] if text == "~" or text.startswith("~/") else text
        return Path(f"/proc/{self.init_pid}/root") / absolute.lstrip("/")

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        place = self.root_path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def processes(self, *, system: bool = False) -> list[Process]:
        """Return the processes on the host, without zombies. Pid 1 and sshd are included only if ``system`` is true."""
        found = [each for each in processes_of(self.init_pid) if each.cmdline] if self.init_pid else []
        return found if system else [each for each in found if each.pid != 1 and "sshd" not in each.cmdline.split()[0]]

    def ssh_sessions(self) -> list[Process]:
        found = self.processes(system=True)
        return [each for each in found if each.cmdline.startswith("sshd: ") and "[listener]" not in each.cmdline]

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process. ``pid`` is its pid as the host sees it."""
        self.run(["bash", "-c", f"kill -{int(signum)} {pid}"])

    # --- faults -----------------------------------------------------------------------

    def cut_network(self) -> None:
        self._port_state(0)

    def restore_network(self) -> None:
        self._port_state(3)

    def _port_state(self, state: int) -> None:
        """Set the state of the host's port on the bridge: 0 disabled, 3 forwarding."""
        tool(["bridge", "link", "set", "dev", self.name, "state", str(state)])

    def slow_link(self, rate: str = "10mbit") -> None:
        """Limit the bandwidth of the host's network link to ``rate``, in the units of ``tc``, in both directions."""
        self._slow = True
        shape = f"root tbf rate {rate} burst 64kb latency 200ms"
        tool(["tc", "qdisc", "replace", "dev", self.name, *shape.split()])
        tool(["tc", "-n", self.name, "qdisc", "replace", "dev", self.machine.interface, *shape.split()])

    def full_speed(self) -> None:
        if not self._slow:
            return
        self._slow = False
        tool(["tc", "qdisc", "del", "dev", self.name, "root"], check=False)
        tool(["tc", "-n", self.name, "qdisc", "del", "dev", self.machine.interface, "root"], check=False)

    def limit_memory(self, size: int | None) -> None:
        """Limit the memory of all processes on the host together to ``size`` bytes (None: no limit)."""
        assert self.memory is not None
        self.memory.limit(size)

    def hide(self, path: str) -> None:
        parent, upper = str(Path(path).parent), f"/run/hidden{Path(path).parent}"
        layers = f"lowerdir={parent},upperdir={upper}/upper,workdir={upper}/work"
        script = (
            f"mkdir -p {upper}/upper {upper}/work && cd / && "
            f"{{ [ -e {upper}/on ] || mount -t overlay -o {layers} overlay {parent}; }} && touch {upper}/on && "
            f"mountpoint -q {parent} && rm -r {path}"
        )
        self.run(["bash", "-c", script])
        self._hidden.append(path)

    def unhide(self) -> None:
        for parent in {str(Path(path).parent) for path in self._hidden}:
            self.run(["bash", "-c", f"umount -l {parent} && rm -r /run/hidden{parent}"])
        self._hidden.clear()


class NetCluster:
    """Several hosts on one network bridge. A context manager that removes the hosts at the end of its block, or when
    the interpreter exits.

    ``shared_folder``: a folder that all hosts and the operator see at the same path; created if missing.
    ``password``: whether sshd also accepts the password PASSWORD, for root and for PASSWORD_USER.
    ``sshd_options``: options of sshd_config on all hosts, e.g. ``{"MaxSessions": "2"}``.
    ``machines``: settings of single hosts, by the index of the host.
    """

    def __init__(
        self,
        count: int,
        *,
        shared_folder: Path | None = None,
        password: bool = False,
        sshd_options: Mapping[str, str] | None = None,
        machines: Mapping[int, Machine] | None = None,
    ):
        remove_leftovers()
        self.owner = os.getpid()
        serial = next(_serial)
        self.name = f"gf{self.owner}c{serial}"
        self.folder = STATE / self.name
        self.bridge = f"{self.name}b"
        self.prefix = free_prefix(64 * self.owner + serial)
        self.shared_folder, self.password, self.sshd_options = shared_folder, password, dict(sshd_options or {})
        self.operator_home = self.folder / "operator"
        self.identity = self.operator_home / ".ssh/id_ed25519"
        self.operator_ssh_config = self.operator_home / ".ssh/config"
        self.hosts: list[Host] = []
        self.hosts = [Host(self, index, (machines or {}).get(index, Machine())) for index in range(count)]

    def __enter__(self) -> NetCluster:
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self.identity.parent.mkdir(parents=True, mode=0o700)
        if self.shared_folder:
            self.shared_folder.mkdir(parents=True, exist_ok=True)
        written = self.folder / "owner.new"
        written.write_text(f"{self.owner} {start_ticks(self.owner)}")
        written.rename(self.folder / "owner")  # written atomically: remove_leftovers of other processes reads it
        ip(f"link add {self.bridge} address {BRIDGE_MAC} type bridge")
        ip(f"addr add {self.prefix}.1/24 dev {self.bridge}")
        ip(f"link set {self.bridge} up")
        keygen(self.identity, "operator")
        for host in self.hosts:
            host.prepare()
            host.power_on()
        for host in self.hosts:
            host.wait_until_up()
        self.ssh_config(self.operator_ssh_config)

    def kept(self) -> list[Path]:
        wanted = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix).resolve()]
        wanted += [self.shared_folder.resolve()] if self.shared_folder else []
        return [path for path in dict.fromkeys(wanted) if any(path.is_relative_to(own) for own in OWN)]

    def ssh_config(self, path: Path) -> Path:
        """Write an ssh client config with one alias per host, and a known_hosts file in the same folder."""
        known = path.with_name("known_hosts")
        blocks = [
            f"Host {host.name} {host.address}\n  HostName {host.address}\n  User root\n  IdentityFile {self.identity}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n"
            + (f"  ProxyJump {self.hosts[host.machine.behind].name}\n" if host.machine.behind is not None else "")
            for host in self.hosts
        ]
        known.write_text(
            "".join(
                f"{host.name},{host.address} {public_key(host.folder / 'etc/host_key.pub')}\n" for host in self.hosts
            )
        )
        path.write_text("\n".join(blocks))
        return path

    def path_on(self, address: str, path: str) -> Path:
        """Convert a path on the host with ``address`` to the path of the same file on the test machine."""
        return next(host for host in self.hosts if host.address == address).root_path(path)

    def know_neighbours(self) -> None:
        """Add permanent ARP entries for all pairs of hosts.

        100 hosts need 9,900 entries; the kernel keeps at most 1,024 that are not permanent, over all namespaces.
        """
        for host in self.hosts:
            others = [(other.address, other.mac) for other in self.hosts if other is not host]
            dev = host.machine.interface
            lines = [f"neigh replace {address} lladdr {mac} dev {dev} nud permanent" for address, mac in others]
            tool(["ip", "-n", host.name, "-batch", "-"], stdin="\n".join(lines))

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment with the variables ``more``, and a HOME with an SSH key and config for the hosts."""
        dropped = {"SSH_AUTH_SOCK", "TMUX", "TMUX_PANE"}
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return kept | {"HOME": str(self.operator_home)} | more

    def close(self) -> None:
        """Remove all hosts, the bridge and their files. May be called twice. Does nothing in a forked child."""
        if os.getpid() != self.owner:
            return
        atexit.unregister(self.close)
        for host in self.hosts:
            host.destroy()
        ip(f"link del {self.bridge}", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
