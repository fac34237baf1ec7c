"""Generates docs/config.md from the config dataclasses (``python -m launcher.config.reference``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launcher.config.schema import settings
from launcher.config.validation import limits_in_words, sections
from launcher.files import CODE_ROOT

_INTRO = """\
# cluster.yml, key by key

<!-- Written by python -m launcher.config.reference; the help texts are in launcher/config/schema.py and
trainer/core/train_config.py. -->

Ready-made files are in `templates/`. The smallest config that runs on two machines:

```yaml
nodes: [alice@gnn1, alice@gnn2]
data: {dataset: synthetic}
```

**Defaults.** `defaults:` at the top level takes the same keys as a node and applies to every node. A key of the node
itself takes precedence. `env` is merged variable by variable. A node's own `python`, `venv` or `conda` replaces the
default for any of the three.

**Short forms.** A node may be written as `host`, `user@host` or `user@host:port`. With `transport: local`, `nodes: 2`
means two nodes on this machine. A list of numbers may be written `15,10,5`, and a list of one text as that text.

**Host ranges.** `node[01-16].lab` is sixteen nodes, `10.0.0.[10-14]` five, `n[1-3,7]r[1-2]` eight; the first bracket
varies slowest, and leading zeros are kept. A range may stand in `nodes` or in `host:` and have up to 4,096 hosts; the
other keys of its entry apply to each host:

```yaml
nodes:
  - node[01-04].lab
  - host: alice@gpu[1-2]:2222
    devices: [0, 1, 2, 3]
  - gnn1:[2201-2202]           # two containers on one host
data: {dataset: synthetic}
```

Inside YAML brackets or braces a range must be quoted: `nodes: ["node[01-04]", "gpu[1-2]"]`. An IPv6 address before a
port is written in brackets: `[fe80::1]:22`. Several nodes may share a host; each must list its own `devices`.

**Servers and clients.** A node's `role` is `worker` (holds parts and trains), `server` (holds parts and samples for
clients) or `client` (trains on whole batches that servers send). Parts are distributed over workers and servers in node
order; `data.replicas` stores each part on several of them. Clients use the servers, or the workers if no node is a
server. `procs` and `devices` of `defaults`, `--set 'nodes.*.procs=2'` and `--num-training-procs` do not apply to
servers. With `data.serving` the graph comes from a serving cluster, and all nodes that train are its clients.
[server_client.md](server_client.md) describes roles in detail; `templates/server_client.yml` is a file to start from:

```yaml
nodes:
  - {host: "mem[1-2].lab", role: server}
  - {host: "gpu[1-3].lab", role: client, devices: [0, 1]}
data: {dataset: ogbn-products, num_parts: 4, replicas: 2}
```

**Paths.** Paths on the launching machine (`key`, `data.source`, `data.folder` in mode sync, `run.files`,
`train.resume`, `train.start`) are relative to the YAML file that contains them. Given with `--set`, they are relative
to the current directory; `run.runs_dir` always is. Paths on a node (`workdir`, `venv`, `data_folder`, and `data.folder`
in mode verify) must begin with `/` or `~/`; only with `transport: local` may they be relative to the YAML file. `~` is
the home folder on the machine that the path refers to.

**Changing a key for one run.** `--set key=value` may be repeated: `--set train.lr=1e-3`,
`--set nodes.0.devices=[0,1]`, `--set defaults.venv=~/venv`; `--set 'nodes.*.procs=2'` sets the key on every node. The
value is YAML; `null` resets a key to its default.

**Fewer hosts or devices for one run.** `--include` and `--exclude` select nodes. Every command that reads the file
accepts both, repeatedly. Included nodes keep the order of the file, excluded nodes are then removed, and the remaining
nodes get new node ranks. The lead node is the first remaining node that trains. `procs` follows the number of remaining
devices, and the default of `data.num_parts` the number of remaining nodes.

| value | selects |
|---|---|
| `node03`, `node03.lab`, `alice@node03:2222` | the host `node03.lab`, with or without domain, user and port |
| `node[03-05]`, `node03,node05`, `gpu*`, `gpu?` | several hosts; case is ignored |
| `node04:0,2`, `gpu[1-2]:0-3` | devices of a host, by the ids in its `devices` |
| `node04:0,2@node05` | several hosts joined by `@`, as in DeepSpeed |
| `node3`, `node[0-3]` | nodes by their rank in the file, unless a host has a name of this form |

```bash
gnnfleet check --config cluster.yml --exclude host2
```

**Errors.** All errors of a file are reported at once, each with file and line, before anything is started.
`gnnfleet check` also checks the machines.
"""

_TITLES = {"": "Top level", "nodes": "nodes (one entry), and defaults"}


def config_page() -> str:
    parts = [_INTRO]
    for name, section in sections().items():
        title = _TITLES.get(name, name)
        hints = get_type_hints(section)
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        for item in settings(section):
            limits: Mapping[str, float] = item.metadata["limits"]
            kind = _type_in_words(hints[item.name]) + (f", {limits_in_words(limits)}" if limits else "")
            rows.append(f"| `{item.name}` | {kind} | {_default(item, hints[item.name])} | {item.metadata['help']} |")
        parts.append("\n".join([f"## {title}\n\n{section.__doc__}\n", *rows]) + "\n")
    return "\n".join(parts)


def main() -> None:
    Path(CODE_ROOT / "docs" / "config.md").write_text(config_page(), encoding="utf-8")


def _type_in_words(hint: Any) -> str:
    """Describe a field's type, for instance ``list of whole numbers`` or ``sync or verify``."""
    words = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    kind, inside = get_origin(hint), get_args(hint)
    if hint in words:
        return words[hint]
    if kind is Literal:
        return " or ".join(f"`{choice}`" for choice in inside)
    if kind in (Union, UnionType):
        return " or ".join(_type_in_words(one) for one in inside if one is not type(None))
    if kind is tuple and get_origin(inside[0]) in (Union, UnionType):
        return "list of " + " or ".join(f"{_type_in_words(one)}s" for one in get_args(inside[0]))
    if kind is tuple:
        plural = "" if get_origin(inside[0]) is Literal else "s"
        return "list of nodes" if is_dataclass(inside[0]) else f"list of {_type_in_words(inside[0])}{plural}"
    return "section"


def _default(item: Field[Any], hint: Any) -> str:
    if item.default is MISSING and item.default_factory is MISSING:
        return "required"
    if item.default in (None, MISSING, (), ""):
        return ""
    value = list(item.default) if isinstance(item.default, tuple) else item.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    main()
