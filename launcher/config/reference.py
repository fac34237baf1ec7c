"""``python -m launcher.config.reference``: writes docs/config.md from the config dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launcher.config.validation import limits_in_words, sections
from launcher.files import CODE_ROOT

_INTRO = """\
# cluster.yml, key by key

This page is written by `python -m launcher.config.reference`; change the help texts in `launcher/config/schema.py`.
Ready-made files are in `templates/`. The smallest config that runs on two machines:

```yaml
nodes: [alice@gnn1, alice@gnn2]
data: {dataset: synthetic}
```

**Defaults.** `defaults:` at the top level takes the same keys as a node and holds for every node. A node's own key
wins; `env` is merged name by name; a node's own `python`, `venv` or `conda` replaces whichever of the three a
default gives.

**Short forms.** A node may be just `host`, `user@host` or `user@host:port`. With `transport: local`, `nodes: 2` stands
for two nodes on this machine. A list of numbers may be written `15,10,5`, and a list of one text as that text.

**Host ranges.** `node[01-16].lab` is sixteen nodes, `10.0.0.[10-14]` five, `n[1-3,7]r[1-2]` eight, the first bracket
varying slowest; leading zeros are kept. A range stands for up to 4,096 hosts, among `nodes` or in `host:`, whose other
keys then hold for each of them:

```yaml
nodes:
  - node[01-04].lab
  - host: alice@gpu[1-2]:2222
    devices: [0, 1, 2, 3]
  - gnn1:[2201-2202]           # two containers on one host
data: {dataset: synthetic}
```

In YAML's own brackets and braces a range must be quoted: `nodes: ["node[01-04]", "gpu[1-2]"]`. An IPv6 address keeps
its brackets before a port: `[fe80::1]:22`. A host may carry several nodes; its devices are divided among them.

**Servers and clients.** A node's `role` is `worker` (holds parts and trains), `server` (holds parts, and samples for
those who train) or `client` (trains, and is sent whole batches by the servers). Parts are spread over workers and
servers in node order; `data.replicas` puts each on several of them. Clients ask the servers, or the workers where there
are no servers. `procs` and `devices` of `defaults`, `--set 'nodes.*.procs=2'` and `--num-training-procs` leave servers
alone. With `data.serving` the graph comes from a serving cluster, and all nodes that train are clients.
[server_client.md](server_client.md) has the rest, `templates/server_client.yml` is a start:

```yaml
nodes:
  - {host: "mem[1-2].lab", role: server}
  - {host: "gpu[1-3].lab", role: client, devices: [0, 1]}
data: {dataset: ogbn-products, num_parts: 4, replicas: 2}
```

**Paths.** Paths of this machine (`key`, `data.source`, `data.folder` in mode sync, `run.files`, `train.resume`) are
relative to the YAML file they stand in; given with `--set` they are relative to the current directory, and so is
`run.runs_dir` always. Paths of a node (`workdir`, `venv`, `data_folder`, and `data.folder` in mode verify) begin with
`/` or `~/`; only with `transport: local` may they be relative to the YAML file. `~` is the home folder of whoever owns
the path.

**Changing a key for one run.** `--set key=value`, as often as needed: `--set train.lr=1e-3`,
`--set nodes.0.devices=[0,1]`, `--set defaults.venv=~/venv`; `--set 'nodes.*.procs=2'` sets it on every node. The value
is YAML; `null` takes a key back to its default.

**Fewer hosts or devices for one run.** `--include` and `--exclude` choose among the nodes, on every command that reads
the file, as often as needed; what is included is kept in the file's order, then what is excluded is taken away, and
node ranks are counted anew. The first node left that trains is the master, `procs` goes with the devices, and so does
the default of `data.num_parts` with the nodes.

| written | chooses |
|---|---|
| `node03`, `node03.lab`, `alice@node03:2222` | the host `node03.lab`, with or without domain, user and port |
| `node[03-05]`, `node03,node05`, `gpu*`, `gpu?` | several; case does not matter |
| `node04:0,2`, `gpu[1-2]:0-3` | devices of a host, by the ids in its `devices` |
| `node04:0,2@node05` | several joined by `@`, as DeepSpeed writes it |
| `node3`, `node[0-3]` | nodes by their rank in the whole file, as tables show it, where no host is called so |

```bash
gnnfleet check --config cluster.yml --exclude host2
```

**Mistakes.** All of them are listed at once, each with file and line; nothing is started. `gnnfleet check` goes on to
look at the machines themselves.
"""

_TITLES = {"": "Top level", "nodes": "nodes (one entry), and defaults"}


def config_page() -> str:
    """The whole of docs/config.md."""
    parts = [_INTRO]
    for name, section in sections().items():
        title = _TITLES.get(name, name)
        parts.append(f"## {title}\n\n{section.__doc__}\n\n{_table(section)}")
    return "\n".join(parts)


def main() -> None:
    """Write the page where it belongs."""
    Path(CODE_ROOT / "docs" / "config.md").write_text(config_page(), encoding="utf-8")


def _table(section: type) -> str:
    hints = get_type_hints(section)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += [_cells(item, hints[item.name]) for item in fields(section)]
    return "\n".join(rows) + "\n"


def _cells(item: Field[Any], hint: Any) -> str:
    limits: Mapping[str, float] = item.metadata["limits"]
    kind = type_in_words(hint) + (f", {limits_in_words(limits)}" if limits else "")
    return f"| `{item.name}` | {kind} | {_default(item, hint)} | {item.metadata['help']} |"


def type_in_words(hint: Any) -> str:
    """``list of whole numbers``, ``sync or verify``, …"""
    words = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    kind, inside = get_origin(hint), get_args(hint)
    if hint in words:
        return words[hint]
    if kind is Literal:
        return " or ".join(f"`{choice}`" for choice in inside)
    if kind in (Union, UnionType):
        return " or ".join(type_in_words(one) for one in inside if one is not type(None))
    if kind is tuple:
        return "list of nodes" if is_dataclass(inside[0]) else f"list of {type_in_words(inside[0])}s"
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
