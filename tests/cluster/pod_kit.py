"""Runs pods of exported Kubernetes manifests on the hosts of a ``NetCluster``, one pod per host.

A pod has the IP address of its host. It has its own pid, mount and UTS namespaces, and an overlay of this machine's
root file system. ``/gnnfleet`` is a shared volume. ConfigMap and Secret are read-only folders. ``/etc/hosts`` has the
names that Kubernetes gives the pods of an Indexed Job or JobSet. Command, variables and mounts are those of the
manifest. Init containers run before the container, in the same namespaces.
"""

from __future__ import annotations

import base64
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netns import REPOSITORY, Host
from netns_tools import SEARCH_PATH
from trainer.core.compiled import kernels_folder
from waiting import DEADLINE

Manifest = Mapping[str, Any]

_SCRIPT = """
set -e
mkdir -p /run/pod; mount -t tmpfs tmpfs /run/pod; cd /run/pod; mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
for path in {shared}; do mkdir -p root$path; mount --rbind $path root$path; done
mount -t proc proc root/proc
hostname {hostname}
cp {hosts} root/etc/hosts
{containers}
"""


@dataclass(frozen=True, eq=False)
class Pod:
    job: str
    index: int
    indexed: bool
    spec: Manifest  #: of the pod template
    subdomain: str

    @property
    def hostname(self) -> str:
        return f"{self.job}-{self.index}"

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return container

    @property
    def init_containers(self) -> Sequence[Manifest]:
        return self.spec.get("initContainers", ())


def jobs_of(manifests: Sequence[Manifest]) -> Iterator[tuple[str, str, Manifest]]:
    """Yield (name, subdomain of the pods, spec) of each Job, including the Jobs that a JobSet creates."""
    for each in manifests:
        name = each["metadata"]["name"]
        if each["kind"] == "Job":
            yield name, each["spec"]["template"]["spec"].get("subdomain", ""), each["spec"]
        if each["kind"] == "JobSet":
            for job in each["spec"]["replicatedJobs"]:
                assert job["replicas"] == 1
                yield f"{name}-{job['name']}-0", each["spec"]["network"]["subdomain"], job["template"]["spec"]


def pods_of(manifests: Sequence[Manifest]) -> list[Pod]:
    return [
        Pod(name, index, spec.get("completionMode") == "Indexed", spec["template"]["spec"], subdomain)
        for name, subdomain, spec in jobs_of(manifests)
        for index in range(spec["completions"])
    ]


class Kubelet:
    """Starts pods on hosts.

    folder: a folder that all hosts see at the same path. secrets: variables of Secrets that are not in ``manifests``.
    """

    def __init__(
        self, manifests: Sequence[Manifest], folder: Path, secrets: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self.folder, self.pods, self.secrets = folder, pods_of(manifests), secrets or {}
        self.volume = folder / "volume"
        self.volume.mkdir()
        self.running: dict[Pod, subprocess.Popen[str]] = {}
        if kernels_folder().exists():  # compiling them again takes a minute
            shutil.copytree(kernels_folder(), self.volume / "kernels")
        for each in manifests:
            if each["kind"] in ("ConfigMap", "Secret"):
                place = folder / each["kind"]
                place.mkdir(exist_ok=True)
                for key, text in {**each.get("data", {}), **each.get("stringData", {})}.items():
                    (place / key).write_text(text)
                for key, text in each.get("binaryData", {}).items():
                    (place / key).write_bytes(base64.b64decode(text))

    def environment(self, pod: Pod, container: Manifest) -> list[str]:
        env = {"PATH": f"{Path(sys.executable).parent}:{SEARCH_PATH}", "HOME": "/root"}
        for source in container.get("envFrom", ()):
            env |= self.secrets[source["secretRef"]["name"]]
        env |= {each["name"]: each["value"] for each in container.get("env", ())}
        env |= {"JOB_COMPLETION_INDEX": str(pod.index)} if pod.indexed else {}
        return [f"{name}={value}" for name, value in env.items()]

    def processes(self, pod: Pod) -> list[tuple[int, str]]:
        """Return pid (on the test machine) and command line of each process of the pod's last start."""
        found, pids = [], [self.running[pod].pid]
        for pid in pids:
            with suppress(OSError):  # it ends just now
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                found.append((pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()))
        return found

    def execute(self, pod: Pod, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a running pod, as a probe does."""
        (root,) = [pid for pid, line in self.processes(pod) if line == shlex.join(pod.container["command"])]
        enter = [
            "nsenter",
            "-t",
            str(root),
            "-m",
            "-u",
            "-p",
            "-n",
            "-r",
            "env",
            "-i",
            *self.environment(pod, pod.container),
        ]
        return subprocess.run([*enter, *command], capture_output=True, text=True, timeout=DEADLINE, check=False)

    def start(self, pod: Pod, host: Host, names: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a pod on a host. ``names``: the other pods' DNS names and addresses."""
        hosts = self.folder / f"hosts-{pod.hostname}"
        own = f"{host.address} {pod.hostname}.{pod.subdomain}.default.svc.cluster.local {pod.hostname}"
        others = [f"{address} {name}" for name, address in names.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", own, *others]) + "\n")
        shared = ["/dev", "/sys", "/tmp", str(REPOSITORY), sys.prefix, str(Path(sys.base_prefix).resolve())]
        script = _SCRIPT.format(
            shared=" ".join(dict.fromkeys(shared)),
            hostname=pod.hostname,
            hosts=hosts,
            containers="\n".join(self._containers(pod)),
        )
        enter = ["nsenter", "-t", str(host.init_pid), "-m", "-u", "-p", "-n", "-r"]
        log = (self.folder / f"log-{pod.hostname}").open("a")
        self.running[pod] = subprocess.Popen(
            [*enter, "--", "unshare", "-m", "-u", "-p", "-f", "--kill-child", "bash", "-c", script],
            env={"PATH": SEARCH_PATH}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return self.running[pod]

    def _containers(self, pod: Pod) -> Iterator[str]:
        """Yield lines that mount the volumes of each container and run it; the last one replaces the shell."""
        mounted: set[str] = set()
        for container in (*pod.init_containers, pod.container):
            new = [mount for mount in container["volumeMounts"] if mount["name"] not in mounted]
            yield from self._mounts(pod, new)
            mounted |= {mount["name"] for mount in new}
            run = shlex.join(["chroot", "root", "env", "-i", *self.environment(pod, container), *container["command"]])
            yield f"exec {run}" if container is pod.container else run

    def _mounts(self, pod: Pod, mounts: Sequence[Manifest]) -> Iterator[str]:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for mount in mounts:
            volume, path = volumes[mount["name"]], f"root{mount['mountPath']}"
            if "emptyDir" in volume:
                yield f"mkdir -p {path}"
                continue
            kind = "ConfigMap" if "configMap" in volume else "Secret" if "secret" in volume else "volume"
            options = "-o ro " if mount.get("readOnly") else ""
            yield f"mkdir -p {path}; mount --bind {self.folder}/{kind} {path}"
            if options:
                yield f"mount -o remount,ro,bind {path}"

    def log(self, pod: Pod) -> str:
        return (self.folder / f"log-{pod.hostname}").read_text(errors="replace")
