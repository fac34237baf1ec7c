"""Checks config values that are valid individually but contradict each other."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace

from launcher.config.roles import host_key
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, node_workdir
from launcher.config.validation import Reader, dotted
from launcher.node.environment import RANK_VARIABLES
from launcher.text import count
from launcher.yaml_tree import shortened
from trainer.core.remote_settings import CacheSize, parse_bytes
from trainer.core.train_config import Neighbors, Schedule, problems

_MOST_RANKS = 65_536

# GNNFLEET_ variables that a node's `env` may set.
_FREE_VARIABLES = frozenset({"GNNFLEET_KERNELS", "GNNFLEET_TORCH_OPS"})

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")


def is_run_id(text: str) -> bool:
    """Whether ``text`` is a valid run id. Names of serving clusters follow the same rules."""
    return _RUN_ID.fullmatch(text) is not None


_MEMORY = re.compile(r"\d+(\.\d+)? *(B|[KMGT]B?)", re.IGNORECASE)

#: UUID of a GPU or a MIG instance, or its first characters; older drivers write MIG-GPU-<uuid>/<number>/<number>.
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z]+(-[0-9A-Za-z]+)*(/[0-9]+){0,2}")

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

# Names of datasets, to recognise a misspelt ``data.dataset`` before a launch; the trainer has the readers.

OWN_DATASETS = ("synthetic", "synthetic-hetero", "file", "tables", "partition")  #: as in ``trainer.data.options``

_OGB_DATASETS = ("ogbn-arxiv", "ogbn-mag", "ogbn-papers100M", "ogbn-products", "ogbn-proteins")

#: Classes of ``torch_geometric.datasets`` in version 2.8.
PYG_DATASETS = tuple(
    """
    AMiner AQSOL Actor AirfRANS Airports Amazon AmazonBook AmazonProducts AttributedGraphDataset BA2MotifDataset
    BAMultiShapesDataset BAShapes BitcoinOTC BrcaTcga CWQDataset CitationFull CityNetwork CoMA Coauthor CoraFull
    CornellTemporalHyperGraphDataset DBLP DBP15K DGraphFin DeezerEurope DynamicFAUST EllipticBitcoinDataset
    EllipticBitcoinTemporalDataset EmailEUCore Entities ExplainerDataset FAUST FB15k_237 FacebookPagePage
    FakeDataset FakeHeteroDataset Flickr GDELT GDELTLite GEDDataset GNNBenchmarkDataset GemsecDeezer
    GeometricShapes GitHub GitMolDataset GraphLandDataset HGBDataset HM HeterophilousGraphDataset HydroNet ICEWS18
    IGMCDataset IMDB InfectionDataset InstructMolDataset JODIEDataset KarateClub LINKXDataset LRGBDataset LastFM
    LastFMAsia MD17 MNISTSuperpixels MalNetTiny MedShapeNet MixHopSyntheticDataset ModelNet MoleculeGPTDataset
    MoleculeNet MovieLens MovieLens100K MovieLens1M MyketDataset NELL NeuroGraphDataset OGB_MAG OMDB OPFDataset
    OSE_GVCS PCPNetDataset PCQM4Mv2 PPI PascalPF PascalVOCKeypoints Planetoid PolBlogs ProteinMPNNDataset QM7b QM9
    RCDD RandomPartitionGraphDataset Reddit Reddit2 RelLinkPredDataset S3DIS SHREC2016 SNAPDataset ShapeNet
    StochasticBlockModelDataset SuiteSparseMatrixCollection TAGDataset TOSCA TUDataset Taobao Teeth3DS Twitch UPFD
    WILLOWObjectClass WebKB WebQSPDataset WikiCS Wikidata5M WikipediaNetwork WordNet18 WordNet18RR Yelp ZINC
    """.split()
)

#: Graphs of classes that have several, as ``Planetoid:Cora``.
_PYG_GRAPHS = {
    "Planetoid": ("Cora", "CiteSeer", "PubMed"),
    "Amazon": ("Computers", "Photo"),
    "Coauthor": ("CS", "Physics"),
    "CitationFull": ("Cora", "Cora_ML", "CiteSeer", "DBLP", "PubMed"),
    "HeterophilousGraphDataset": ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions"),
    "WebKB": ("Cornell", "Texas", "Wisconsin"),
    "WikipediaNetwork": ("Chameleon", "Squirrel"),
    "Entities": ("AIFB", "AM", "MUTAG", "BGS"),
    "HGBDataset": ("ACM", "DBLP", "Freebase", "IMDB"),
    "Airports": ("USA", "Brazil", "Europe"),
}

_HELD_OUT = ("hold_out", "hold_out_val", "hold_out_test", "hold_out_time")

_GENERATED = (
    *("num_nodes", "avg_degree", "num_classes", "num_features", "homophily", "noise", "seed", "train", "val", "test"),
    *("edge_weight", "time", *_HELD_OUT),
)

#: Names of the options of generated graphs; of other datasets but ``tables`` and ``partition``: ``READ_OPTIONS``.
GENERATED_OPTIONS = {
    "synthetic": (*_GENERATED, "skew"),
    "synthetic-hetero": (*_GENERATED, "all_features", "undirected"),
}
READ_OPTIONS = (
    *("num_nodes", "num_classes", "undirected", "normalize_features", "split", "time_attrs", "hetero", "target"),
    *("reverse_types", "subset", *_HELD_OUT, "hold_out_split"),
)


def check_nodes(config: ClusterConfig, reader: Reader) -> None:
    """Report settings that contradict each other in one node or between two nodes; invalid values are skipped."""
    for k, node in enumerate(config.nodes):
        _node(config, node, k, reader)

    # Nodes of one host.
    by_folder: dict[tuple[str, ...], int] = {}
    for k, node in enumerate(config.nodes):
        if not reader.good(*(("nodes", k, name) for name in ("host", "port", "user", "workdir"))):
            continue
        folder = node_workdir(node, k)
        user = str(node.user) if folder.startswith("~") else ""
        same = by_folder.setdefault((host_key(config, node), str(node.port), user, folder), k)
        if same != k:
            reader.report(
                ("nodes", k),
                f"nodes.{k} has the same host and workdir as nodes.{same} ({node.host}, "
                f"{folder}); give each node its own workdir, or put {{node_rank}} into the path",
            )
    by_device: dict[tuple[str, str, int | str], int] = {}
    for k, node in enumerate(config.nodes):
        if not reader.good(*(("nodes", k, name) for name in ("host", "port", "devices"))):
            continue
        for device in node.devices:
            same = by_device.setdefault((host_key(config, node), str(node.port), device), k)
            if same != k:
                reader.report(
                    ("nodes", k, "devices"),
                    f"nodes.{k}.devices: device {device} of {node.host} is already listed in nodes.{same}; "
                    "nodes on one host must use different devices",
                )
                break


def check(config: ClusterConfig, reader: Reader) -> None:
    """Report contradictions in the config of the whole cluster: roles, parts, training settings and ports."""
    if not config.nodes and reader.good(("nodes",)):
        reader.report(("nodes",), "nodes: empty; list at least one host")
    elif config.nodes and not config.data.serving and reader.good(("nodes",), ("data", "serving")):
        _holders(config, reader)
    if config.world_size > _MOST_RANKS and reader.good(("nodes",)):
        reader.report(
            ("nodes",),
            f"nodes: {config.world_size:,} training processes in total, of at most {_MOST_RANKS:,}; lower procs",
        )
    _data(config, reader)
    _training(config, reader)
    run, training = config.run, sum(node.trains for node in config.nodes)

    # Ports.
    good = reader.good(("run", "master_port"), ("run", "service_port"), ("run", "control_port"))
    if good and run.service_port != "auto":
        last = run.service_port + len(config.nodes) - 1
        if last > 65535:
            reader.report(
                ("run", "service_port"),
                f"run.service_port: {len(config.nodes)} nodes need ports {run.service_port} to {last}, "
                "but 65535 is the highest",
            )
        for name in ("master_port", "control_port"):
            port = getattr(config.run, name)
            if port != "auto" and run.service_port <= port <= last:
                reader.report(
                    ("run", name),
                    f"run.{name}: {port} is one of the graph service's ports, {run.service_port} to {last} "
                    "(run.service_port)",
                )
    if good and run.control_port != "auto" and run.control_port == run.master_port:
        reader.report(
            ("run", "control_port"), f"run.control_port: {run.control_port} is also run.master_port; choose another"
        )

    # Restarts, and whom to tell.
    if (
        run.restarts
        and config.nodes
        and run.min_nodes > max(1, training)
        and reader.good(("run", "min_nodes"), ("nodes",))
    ):
        reader.report(
            ("run", "min_nodes"),
            f"run.min_nodes is {run.min_nodes}, but only {count(training, 'node')} "
            f"{'trains' if training == 1 else 'train'}; lower it",
        )
    for number, target in enumerate(config.run.notify):
        try:
            wrong = "" if shlex.split(target) else "expected a URL, a command or $NAME, found an empty text"
        except ValueError as error:
            wrong = f"`{target}`: {error}"
        if re.match(r"https?://[^/]*@", target, re.IGNORECASE):
            wrong = "a URL with a user or password; put the whole URL into a variable of the node, and name it: $NAME"
        if wrong:
            reader.report(("run", "notify", number), f"run.notify: {wrong}")


def _node(config: ClusterConfig, node: NodeConfig, k: int, reader: Reader) -> None:
    here = ("nodes", k)
    if config.local and reader.good(("transport",), (*here, "host")) and node.host not in LOCAL_HOSTS:
        reader.report(
            (*here, "host"),
            f"nodes.{k}.host: `transport: local` runs nodes on this machine only; "
            f"write localhost instead of `{node.host}`, or use `transport: ssh`",
        )
    if node.venv and node.conda:
        reader.report(
            (*here, "conda"), f"nodes.{k}: venv and conda are both given; keep the one in which torch is installed"
        )
    if node.wrap and node.conda:
        reader.report(
            (*here, "wrap"),
            f"nodes.{k}: wrap and conda are both given; write `wrap: [conda, run, --name, {node.conda}]` and leave "
            "conda out",
        )
    if node.wrap and " " in node.wrap[0]:
        reader.report(
            (*here, "wrap"),
            f"nodes.{k}.wrap: `{node.wrap[0]}` is one word; write a list of words: [{', '.join(node.wrap[0].split())}]",
        )
    for name, folder in (("workdir", node.workdir), ("data_folder", node.data_folder or "")):
        if node.wrap and set(":,") & set(folder):
            reader.report(
                (*here, name),
                f"nodes.{k}.{name}: containers cannot be shown a folder with a colon or comma in its name; choose "
                "another one, or leave `wrap` out",
            )
    wrong = next((device for device in node.devices if isinstance(device, str) and not _UUID.fullmatch(device)), None)
    if wrong is not None:
        reader.report(
            (*here, "devices"),
            f"nodes.{k}.devices: `{wrong}` is neither a whole number nor a UUID as `nvidia-smi -L` lists it (GPU-…, "
            "MIG-…)",
        )
    elif len(set(node.devices)) < len(node.devices):
        twice = next(device for device in node.devices if node.devices.count(device) > 1)
        reader.report((*here, "devices"), f"nodes.{k}.devices: device {twice} is listed twice")
    elif node.procs and node.devices and node.procs != len(node.devices):
        fewer = "fewer" if node.procs < len(node.devices) else "more"
        reader.report(
            (*here, "procs"),
            f"nodes.{k}: {fewer} procs ({node.procs}) than devices ({len(node.devices)}); "
            "each process uses one device, so leave procs out or list as many devices",
        )
    for name in ("procs", "devices"):  # Reader has already removed values that were set for all nodes at once
        if node.role == "server" and getattr(node, name):
            reader.report(
                ("nodes", k, name),
                f"nodes.{k}.{name}: a server starts no training processes; leave {name} out, or make it `role: worker`",
            )
    if node.memory is not None and reader.good((*here, "memory")):
        try:
            parse_bytes(node.memory)
        except ValueError as error:
            reader.report((*here, "memory"), f"nodes.{k}.memory: {error}")
    for name in node.env:
        if name in RANK_VARIABLES or name.startswith("GNNFLEET_") and name not in _FREE_VARIABLES:
            reader.report((*here, "env"), f"nodes.{k}.env: {name} is set by gnnfleet for each process; leave it out")
    if node.data_folder and config.data.mode == "sync" and reader.good(("data", "mode")):
        reader.report(
            (*here, "data_folder"),
            f"nodes.{k}.data_folder: only for `data.mode: verify`; in mode sync the parts go below workdir",
        )


def _holders(config: ClusterConfig, reader: Reader) -> None:
    holders, data = len(config.holders), config.data
    if not holders:
        reader.report(
            ("nodes",),
            "nodes: all are clients, so no node holds the graph; give some nodes `role: server` or `role: worker`, or "
            "name a serving cluster (--set data.serving=NAME)",
        )
        return
    if config.num_parts < holders and reader.good(("data", "num_parts")):
        all_hold = holders == len(config.nodes)
        who = f"nodes has {holders} entries" if all_hold else f"{count(holders, 'node')} hold parts"
        reader.report(
            ("data", "num_parts"),
            f"fewer parts than nodes: data.num_parts is {data.num_parts}, but {who}; leave num_parts out or raise it",
        )
    if data.replicas > holders and reader.good(("data", "replicas")):
        who = "only 1 node holds parts" if holders == 1 else f"only {holders} nodes hold parts"
        reader.report(
            ("data", "replicas"),
            f"data.replicas is {data.replicas}, but {who}; lower it, or add nodes of `role: server`",
        )


def _data(config: ClusterConfig, reader: Reader) -> None:
    data = config.data
    sources = {
        "file": "the folder or .pt file that `dataset: file` reads",
        "tables": "the folder of the tables",
        "partition": "the partition folder to read",
    }
    wrong = misspelt_dataset(data.dataset) if data.dataset and config.makes_parts else ""
    if wrong and reader.good(("data", "dataset")):
        reader.report(("data", "dataset"), f"data.dataset: {wrong}")
    known = GENERATED_OPTIONS.get(data.dataset, READ_OPTIONS)
    unknown = next((name for name in data.options if name not in known), None)
    checked = not wrong and config.makes_parts and data.dataset not in ("", "tables", "partition")
    if unknown is not None and checked and reader.good(("data", "dataset"), ("data", "options")):
        near = difflib.get_close_matches(unknown, known, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"the options are {', '.join(known)}"
        reader.report(
            ("data", "options"), f"data.options: dataset {data.dataset} has no option `{shortened(unknown)}`; {hint}"
        )
    needed = sources.get(data.dataset)
    if needed and not data.source and config.makes_parts and reader.good(("data", "source")):
        reader.report(("data", "dataset"), f"data.source is missing; it is {needed}")
    missing = [name for name in ("nodes", "edges") if not data.options.get(name)]
    if data.dataset == "tables" and missing and config.makes_parts and reader.good(("data", "options")):
        reader.report(
            ("data", "dataset"),
            f"data.options.{missing[0]} is missing: it describes the {missing[0][:-1]} tables (docs/data.md); "
            f"`gnnfleet partition tables {data.source or 'FOLDER'}` drafts it",
        )
    if data.partition.method == "keep" and data.dataset != "partition" and reader.good(("data", "partition")):
        reader.report(
            ("data", "partition", "method"),
            "data.partition.method: keep is for `dataset: partition`, whose source is a partition folder",
        )
    if reader.good(("data", "cache")):
        try:
            CacheSize.parse(data.cache)
        except ValueError as error:
            reader.report(("data", "cache"), f"data.cache: {error}")
    memory, place = data.partition.memory, ("data", "partition", "memory")
    if memory is not None and not _MEMORY.fullmatch(memory.strip()) and reader.good(place):
        reader.report(place, f"data.partition.memory: expected a size (4GB), found `{memory}`")
    if data.store is not None or data.store_options or data.store_limit is not None:
        from launcher.config.store_consistency import check_store

        check_store(config, reader)
    if data.serving:
        _serving(config, reader)
    elif not data.dataset and ("data",) not in reader.bad and reader.good(("data", "dataset"), ("data", "serving")):
        reader.missing(next(item for item in fields(data) if item.name == "dataset"), ("data",))


def _training(config: ClusterConfig, reader: Reader) -> None:
    """Report settings in ``train`` that contradict each other, or do not fit the nodes."""
    train = config.train
    bad = {str(path[1]) for path in reader.bad if path[0] == "train" and len(path) > 1}
    sections = {name: None for name in bad if isinstance(getattr(train, name, None), Mapping | Schedule | Neighbors)}
    for problem in list(problems(replace(train, **sections))):  # type: ignore[arg-type]
        place = ("train", *problem.place)
        if bad.isdisjoint((problem.place[0], *problem.others)):
            reader.report(place, f"{dotted(place)}: {problem.text}")
    if reader.good(("nodes",), ("train", "batch_size")) and train.batch_size < config.world_size:
        reader.report(
            ("train", "batch_size"),
            f"train.batch_size: the global batch is {train.batch_size}, fewer seeds "
            f"than processes ({config.world_size}); raise it or use fewer processes",
        )
    cpu_only = next((k for k, node in enumerate(config.nodes) if node.trains and not node.devices), None)
    if train.backend == "nccl" and cpu_only is not None and reader.good(("nodes",)):
        host = config.nodes[cpu_only].host
        reader.report(
            ("train", "backend"),
            f"train.backend: nccl needs devices on every node, but {host} (node{cpu_only}) lists none",
        )
    # a device named by a UUID that begins with MIG is a MIG instance
    mig = (k for k, node in enumerate(config.nodes) for device in node.devices if str(device).startswith("MIG"))
    if train.backend == "nccl" and config.world_size > 1 and (k := next(mig, None)) is not None:
        reader.report(
            ("train", "backend"), f"train.backend: nccl does not connect MIG instances (node{k}); use auto or gloo"
        )
    if train.sampling != "cuda" or not reader.good(("nodes",), ("train", "sampling"), ("data", "topology")):
        return
    client = next((k for k, node in enumerate(config.nodes) if node.trains and not node.holds), None)
    if cpu_only is not None:
        host = config.nodes[cpu_only].host
        text = f"train.sampling: cuda needs devices on every node, but {host} (node{cpu_only}) lists none"
    elif client is not None:
        host = config.nodes[client].host
        text = f"train.sampling: cuda needs parts on the nodes that train, but {host} (node{client}) is a client"
    elif config.data.topology == "partitioned" and sum(node.holds for node in config.nodes) > 1:
        text = "train.sampling: cuda needs the edges of all parts on each node; set data.topology to replicated"
    else:
        return
    reader.report(("train", "sampling"), text)


def _serving(config: ClusterConfig, reader: Reader) -> None:
    # These keys of ``data`` may come with ``--set data.serving``: the same file may start the serving cluster.
    if not is_run_id(config.data.serving or ""):
        reader.report(
            ("data", "serving"),
            f"data.serving: {config.data.serving!r} is not a valid name of a serving cluster; names have up to 80 "
            "letters, digits, `-` and `_`",
        )
    if not reader.origin(("data", "serving")).line:
        return
    folder = os.path.normpath(reader.origin(("data", "folder")).folder / DataConfig.folder)
    standard = DataConfig(folder=folder)
    names = ("folder", "num_parts", "replicas", "mode", "partition", "topology", "cache", "store")
    for name in names:
        if reader.given(("data", name)) and getattr(config.data, name) != getattr(standard, name):
            reader.report(
                ("data", name),
                f"data.{name}: the parts are those of the serving cluster `{config.data.serving}` (data.serving); "
                f"leave {name} out",
            )


def misspelt_dataset(name: str) -> str:
    """Return why ``name`` is no dataset, in words, or '' if it is one or may be one of a newer torch_geometric."""
    known, (word, colon, graph) = (*OWN_DATASETS, *_OGB_DATASETS, *PYG_DATASETS), name.partition(":")
    if colon and word in (*OWN_DATASETS, *_OGB_DATASETS):
        return f"there is no dataset `{name[:100]}`; did you mean `{word}`?"
    if word in known:
        named = {one.lower(): f"{word}:{one}" for one in _PYG_GRAPHS.get(word, ())}
        wanted = graph.lower().replace("_", "-") if word == "HeterophilousGraphDataset" else graph.lower()
        nearest = difflib.get_close_matches(wanted[:100], named, 1)
        if wanted in named or not named or graph and not nearest:  # the graph may be one of a newer torch_geometric
            return ""
        hint = (
            f"did you mean `{named[nearest[0]]}`?" if nearest else f"it has several graphs: {', '.join(named.values())}"
        )
        return f"there is no dataset `{name[:100]}`; {hint}"
    by_lower = {one.lower(): one for one in known}
    for kind, graphs in _PYG_GRAPHS.items():
        if word.lower() not in by_lower and (found := [one for one in graphs if one.lower() == word.lower()]):
            return f"there is no dataset `{name[:100]}`; did you mean `{kind}:{found[0]}`?"
    near = difflib.get_close_matches(word.lower()[:100], by_lower, 1, 0.75)
    if near:
        variant = name[len(word) :][:100]
        return f"there is no dataset `{name[:100]}`; did you mean `{by_lower[near[0]]}{variant}`?"
    if "/" in word or "." in word:
        return (
            f"there is no dataset `{name[:100]}`; a graph of your own is `dataset: file` with its path in `source`, "
            "and --dataset takes a path that exists"
        )
    if word[:1].isupper():  # as all classes of torch_geometric
        return ""
    return (
        f"there is no dataset `{name[:100]}`; there are {', '.join(OWN_DATASETS)}, {', '.join(_OGB_DATASETS)}, and "
        "those of torch_geometric, such as Planetoid:Cora"
    )
