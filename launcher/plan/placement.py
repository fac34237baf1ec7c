"""Determines folders, addresses, ports, interpreter, ranks and parts of each node."""

from __future__ import annotations

import ipaddress
import itertools
import posixpath
import re
import shlex
import sys
from collections.abc import Mapping

from launcher.command import Command, quote
from launcher.config.roles import ServingCluster, clients, gateways, holdings, serves
from launcher.config.schema import ClusterConfig, NodeConfig, node_workdir
from launcher.errors import node_label
from launcher.node.environment import RANK_VARIABLES
from launcher.plan.model import NO_SITE, Login, NodeFacts, NodePlan, target_text
from launcher.plan.partition import PartitionFiles
from launcher.plan.ports import choose, lead_candidates, service_candidates

_SOURCE_CONDA = (
    """for root in "${CONDA_EXE%/bin/conda}" "$HOME"/{miniconda3,miniforge3,mambaforge,anaconda3} """
    """/opt/{conda,miniconda3,miniforge3,anaconda3}; do """
    """if [ -f "$root/etc/profile.d/conda.sh" ]; then . "$root/etc/profile.d/conda.sh"; break; fi; done"""
)

_REQUIRE_CONDA = (
    "command -v conda >/dev/null || { echo 'conda was not found in the usual places: "
    "set conda to the path of the environment, or source conda.sh in setup' >&2; exit 127; }"
)


#: Appended to PATH: the only Python of a host may be that of conda or of an environment made by gnnfleet.
MORE_PYTHONS = 'export PATH="$PATH:' + ":".join(
    [f"$HOME/{name}/bin" for name in ("gnnfleet-venv", "miniconda3", "miniforge3", "anaconda3", "mambaforge")]
    + ["/opt/conda/bin", "/opt/miniconda3/bin", "/usr/local/bin"]
) + '"'  # fmt: skip


#: Command of any Python that can run ``launcher/node/programs``: python3, else a newer one, also of pyenv, uv or conda.
ANY_PYTHON = (
    "bash",
    "-c",
    """IFS=$'\\n'
for python in $(type -ap python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8) \\
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3 \\
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/*/bin/python3; do
  if "$python" -S -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; then exec "$python" "$@"; fi
done
echo "no Python 3.8 or newer on PATH, nor of conda, pyenv or uv" >&2
exit 127""",
    "python3",
)


def session_name(run_id: str, node_rank: int) -> str:
    return "gnnfleet-" + re.sub(r"[^A-Za-z0-9_-]", "-", f"{run_id}-node{node_rank}")


def run_dir(workdir: str, run_id: str, node_rank: int) -> str:
    """Return the path of a run folder on a node."""
    return f"{workdir}/runs/{run_id}/node{node_rank}"


def place_nodes(
    config: ClusterConfig,
    run_id: str,
    facts: Mapping[int, NodeFacts],
    code_digest: str,
    manifest: PartitionFiles | None = None,
    serving: ServingCluster | None = None,
    running: Mapping[int, NodePlan] | None = None,
    own: bool = False,
) -> tuple[NodePlan, ...]:
    """Return the plan of each node, in node_rank order, without its files and the commands that its supervisor runs.

    ``running``: nodes of a serving cluster that run already, and stay as they are. ``own``: ranks run the user's own
    command. The other arguments are those of ``launcher.plan.build.make_plan``.
    """
    data_name = manifest.fingerprint if manifest else re.sub(r"[^\w.-]+", "-", config.data.dataset)
    # The home server of each client: graph servers round-robin.
    if serving:
        labels = [serving.label(server) for server in serving.servers]
    else:
        labels = [node_label(k, config.nodes[k].host) for k in gateways(config)]
    held, homes = holdings(config), dict(zip(clients(config), itertools.cycle(labels), strict=False))
    nodes, first_rank = [], 0
    for k, node in enumerate(config.nodes):
        if running and k in running:
            nodes.append(running[k])
            continue
        fact, login = facts.get(k), node_login(config, node)
        workdir = at_home(node_workdir(node, k), fact)
        code_dir, folder = f"{workdir}/code/{code_digest[:16]}", run_dir(workdir, run_id, k)
        ranks = tuple(range(first_rank, first_rank + node.nproc))
        first_rank += node.nproc
        # Where other nodes reach it: before preflight, its host name.
        address = node.address or ("127.0.0.1" if config.local else fact.address if fact else node.host)
        control, master = lead_candidates(config, k)

        # The command that tmux runs: the supervisor, which starts the processes in ``node.json``.
        shell = interpreter(config, k)
        program = f"{code_dir}/launcher/node/supervisor/supervisor.py"
        data_dir = f"{workdir}/data/{data_name}" if node.holds else ""
        if node.holds and config.data.mode != "sync":
            data_dir = at_home((node.data_folder or config.data.folder).rstrip("/"), fact)
        env = with_user_env(
            node,
            fact,
            {
                "PYTHONPATH": code_dir,
                "PYTHONUNBUFFERED": "1",
                **({"GNNFLEET_KERNELS": f"{workdir}/kernels"} if node.wrap else {}),  # $HOME may be the container's
            },
        )
        start = Command(
            (fact.python if fact and not node.wrap else shell.argv[0], NO_SITE, program, f"{folder}/node.json"),
            env,
            folder,
            (*shell.setup, *([f"mkdir -p {quote(f'{folder}/files')}"] if own and ranks else [])),
        )

        nodes.append(
            NodePlan(
                label=node_label(k, target_text(login)),
                role=node.role,
                ranks=ranks,
                parts=held[k].parts,
                address=address,
                bind=_bind(address, fact),
                control_port=choose(control, fact),
                master_port=choose(master, fact),
                node_rank=k,
                login=login,
                devices=node.devices,
                workdir=workdir,
                code_dir=code_dir,
                data_dir=data_dir,
                run_dir=folder,
                service_port=choose(service_candidates(config, k), fact) if serves(config, k) else 0,
                session=session_name(run_id, k),
                start=start,
                wrap=container(config, k, fact, env, data_dir),
                outer_python=((fact.python,) if fact else outer_python(config, k).argv) if node.wrap else (),
                copies=held[k].copies,
                home=homes.get(k, ""),
                slurm_job=config.slurm_job or ("%j" if config.in_job_steps else ""),
            )
        )
    return tuple(nodes)


def interpreter(config: ClusterConfig, node_rank: int) -> Command:
    """Return a command that starts the node's Python, with the shell lines that make this Python available."""
    node = config.nodes[node_rank]
    conda: tuple[str, ...] = ()
    if node.venv or (node.conda and "/" in node.conda):
        python = f"{(node.venv or node.conda or '').rstrip('/')}/bin/python"
    elif node.conda:
        python, conda = "python", (_SOURCE_CONDA, _REQUIRE_CONDA, f"conda activate {shlex.quote(node.conda)}")
    else:
        own = config.shares_files and node.python == "python3" and not node.wrap
        python = sys.executable if own else node.python
    path = (f'export PATH={quote(posixpath.dirname(python))}:"$PATH"',) if "/" in python else ()
    return Command((python,), setup=(*node.setup, *conda, *path))


def outer_python(config: ClusterConfig, node_rank: int) -> Command:
    """Return the command that starts a Python, 3.8 or newer, outside of ``wrap``; without ``wrap``, the node's Python.

    It runs ``launcher/node/programs``, ``control`` and ``watch``, for which it needs no package.
    """
    node = config.nodes[node_rank]
    if not node.wrap:
        return interpreter(config, node_rank)
    return Command((sys.executable,) if config.shares_files else ANY_PYTHON, setup=node.setup)


def container(
    config: ClusterConfig, node_rank: int, fact: NodeFacts | None, env: Mapping[str, str], data_dir: str = ""
) -> tuple[str, ...]:
    """Return the words before a command in a node's container, with options that show it the folders of a run.

    () without ``wrap``. env: the variables that the command gets. data_dir: the partition folder; '' for none.
    """
    node, run = config.nodes[node_rank], config.run
    if not node.wrap:
        return ()
    from launcher.plan.wrap import wrapped

    store = (config.data.store or "").partition("file://")[2]
    folders = [at_home(node_workdir(node, node_rank), fact), data_dir, store, run.prometheus or ""]
    folders += [at_home(node.env["GNNFLEET_KERNELS"], fact)] if "GNNFLEET_KERNELS" in node.env else []
    absolute = [folder for folder in folders if folder.startswith(("/", "~/"))]
    return wrapped(node.wrap, absolute, env, fact.ids if fact else "")


def _bind(address: str, fact: NodeFacts | None) -> str:
    """Return the address at which a node listens, given the ``address`` at which other nodes reach it.

    Before preflight (``fact`` is None) this is ``address``. After preflight, a host name is replaced by an IP address
    of the node. An IP address that none of the node's interfaces has (NAT) is replaced by the wildcard address.
    """
    if fact is None or (is_ip(address) and (address in fact.addresses or not fact.addresses)):
        return address
    if not is_ip(address):
        return fact.address
    return "::" if ":" in address else "0.0.0.0"


def node_interface(config: ClusterConfig, node: NodeConfig, fact: NodeFacts | None) -> str:
    found = "lo" if config.local else fact.interface if fact else ""
    return node.interface or found


def node_login(config: ClusterConfig, node: NodeConfig) -> Login | None:
    return None if config.local else Login(node.user, node.host, node.port)


def with_user_env(node: NodeConfig, fact: NodeFacts | None, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables ``ours``, overridden by ``env`` in the node's config.

    A PYTHONPATH in ``env`` is appended to the one in ``ours``. ``env`` does not override variables that gnnfleet sets
    for each rank.
    """
    user = {name: at_home(value, fact) for name, value in node.env.items() if name not in RANK_VARIABLES}
    if "PYTHONPATH" in user:
        user["PYTHONPATH"] = f"{ours['PYTHONPATH']}:{user['PYTHONPATH']}"
    return {**ours, **user}


def at_home(path: str, fact: NodeFacts | None) -> str:
    """Return ``path`` with a leading ``~/`` replaced by the node's home folder, if preflight has found it."""
    return f"{fact.home.rstrip('/')}/{path[2:]}" if fact and path.startswith("~/") else path


def endpoint(address: str, port: int) -> str:
    """Return ``tcp://address:port``, with an IPv6 address in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
