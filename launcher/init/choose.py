"""Chooses for each host the Python to train with and the devices, so that they fit the other hosts."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.init.discover import Environment, Gpu, HostFacts
from launcher.init.request import InitRequest
from launcher.preflight.check_devices import MOST_USED

Choice = dict[int, Environment | None]


@dataclass(frozen=True)
class Offer:
    """Environments at the same place, of hosts that may all use them."""

    key: str
    path: str
    hosts: tuple[int, ...]
    versions: Mapping[str, str]  #: on the first of these hosts


def choose(request: InitRequest, looks: Mapping[int, HostFacts]) -> Choice:
    """For each host the environment to use; None where nothing fits.

    What the request names is taken as it is. Else versions come first: those that most hosts have; then CUDA where
    there are GPUs; then the place that most hosts have.
    """
    if request.local and not request.environment:  # this very Python, which is looked at first
        return {k: next(iter(look.environments), None) for k, look in looks.items()}
    if request.environment:
        return {k: _named(request, look.environments) for k, look in looks.items()}
    alike = _most_common(looks)
    places = Counter((one.key, one.path) for look in looks.values() for one in look.environments if one.alike == alike)

    def worth(look: HostFacts, one: Environment) -> tuple[object, ...]:
        right_build = bool(one.versions.get("cuda")) == bool(look.gpus)
        return (
            one.complete,
            one.alike == alike,
            right_build,
            places[one.key, one.path],
            -len(one.lacking),
            one.numbers("torch"),
        )

    usable = {k: [one for one in look.environments if one.versions.get("torch")] for k, look in looks.items()}
    return {k: max(usable[k], key=lambda one, k=k: worth(looks[k], one), default=None) for k in looks}  # type: ignore[misc]


def _named(request: InitRequest, there: Sequence[Environment]) -> Environment | None:
    [(key, text)] = request.environment.items()
    path = text.rstrip("/")
    for one in there:
        if one.path == path or key == "conda" and one.key == "conda" and one.path.rpartition("/")[2] == path:
            return Environment(key, text, one.versions)
    return None


def _most_common(looks: Mapping[int, HostFacts]) -> tuple[str, ...]:
    """The versions that most hosts can have, the newest torch of those; () when no host has all packages."""
    counts: Counter[tuple[str, ...]] = Counter()
    newest: dict[tuple[str, ...], tuple[int, ...]] = {}
    for look in looks.values():
        complete = [one for one in look.environments if one.complete]
        counts.update({one.alike for one in complete})
        newest |= {one.alike: one.numbers("torch") for one in complete}
    return max(counts, key=lambda alike: (counts[alike], newest[alike]), default=())


def offers(looks: Mapping[int, HostFacts]) -> tuple[Offer, ...]:
    """Places where complete environments are, those of most hosts first."""
    found: dict[tuple[str, str], list[int]] = {}
    versions: dict[tuple[str, str], Mapping[str, str]] = {}
    for k, look in looks.items():
        for one in look.environments:
            if one.complete:
                found.setdefault((one.key, one.path), []).append(k)
                versions.setdefault((one.key, one.path), one.versions)
    made = [Offer(*place, tuple(hosts), versions[place]) for place, hosts in found.items()]
    return tuple(sorted(made, key=lambda offer: -len(offer.hosts)))


def devices(look: HostFacts, environment: Environment | None) -> tuple[Gpu, ...]:
    """GPUs that a node may use: none without a torch for CUDA, and none that others use or that is divided (MIG)."""
    if environment is None or not environment.versions.get("cuda"):
        return ()
    return tuple(gpu for gpu in look.gpus if free(gpu))


def free(gpu: Gpu) -> bool:
    return not gpu.mig and gpu.used <= gpu.memory * MOST_USED


def shares_of(
    ranks: Iterable[int], hosts: Mapping[int, str], looks: Mapping[int, HostFacts], chosen: Choice
) -> dict[int, tuple[int, ...]]:
    """CUDA ids of each node; those of a host that is listed several times are divided among its nodes."""
    of_host: dict[str, list[int]] = {}
    for k in ranks:
        of_host.setdefault(hosts[k].lower(), []).append(k)
    found = {}
    for same in of_host.values():
        for i, k in enumerate(same):
            ids = [gpu.index for gpu in devices(looks[k], chosen[k])]
            found[k] = tuple(ids[len(ids) * i // len(same) : len(ids) * (i + 1) // len(same)])
    return found


_HETERO_NAMES = ("synthetic-hetero", "ogbn-mag", "OGB_MAG", "DBLP", "IMDB", "AMiner")

_READ = 16 << 20  #: bytes of a pickle that are looked through; tensors lie outside of it


@dataclass(frozen=True)
class GraphDraft:
    """What is written of a graph; ``about`` are remarks on its keys."""

    dataset: str
    source: str | None = None
    hetero: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def short_name(self) -> str:
        """For the folder of its parts."""
        name = Path(self.source).stem if self.source else self.dataset
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.").lower() or "graph"


def graph_of(dataset: str, source: str | None) -> GraphDraft:
    """Looks into ``source`` as far as that is quick; nothing is unpickled."""
    if dataset == "synthetic":
        about = "made on the spot; else `file`, ogbn-products, Planetoid:Cora …"
        return GraphDraft(dataset, source, options={"num_nodes": 100_000, "avg_degree": 15}, about=about)
    if dataset == "file" and source:
        path = Path(source).expanduser()
        hetero = _typed_names(path) if path.is_dir() else _pickled_hetero(path)
        return GraphDraft(dataset, source, hetero, about="your own arrays, or a Data or HeteroData (docs/data.md)")
    return GraphDraft(dataset, source, dataset.rpartition(":")[2] in _HETERO_NAMES)


def _typed_names(folder: Path) -> bool:
    """Files such as paper__cites__paper.npy, and no plain edge_index: how the trainer reads a folder, too."""
    names = {path.stem for path in folder.iterdir()}
    return "edge_index" not in names and any(re.fullmatch(r"[^_].*?__.+?__.+", name) for name in names)


def _pickled_hetero(path: Path) -> bool:
    """Whether a .pt holds a HeteroData, or its to_dict(): by the names in its pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(pickled) as file:
                words = [str(word) for _, word, _ in pickletools.genops(file.read(_READ)) if isinstance(word, str)]
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile):
        return False  # the trainer says what is wrong with it
    return "_global_store" in words or any(word.endswith(" HeteroData") for word in words)
