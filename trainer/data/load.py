"""Datasets by name: `synthetic`, `file`, `ogbn-*`, and names of ``torch_geometric.datasets``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trainer.data.build import RawGraph, build_dataset
from trainer.data.dataset import Dataset
from trainer.data.file import read_files, source_files
from trainer.data.options import SourceOptions, SyntheticOptions, parse_options
from trainer.data.synthetic import make_synthetic

_GENERATION = 1  #: raise when the same name and options begin to give another graph


def load_dataset(name: str, source: str | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """Load or make a graph. Raises ``DataError``.

    ``source`` is the folder or .pt file (`file`), or the download folder (`ogbn-*`, `Planetoid:Cora`).
    """
    fingerprint = dataset_fingerprint(name, source, options)
    if name == "synthetic":
        return make_synthetic(parse_options(SyntheticOptions, options or {}, name), fingerprint)
    return build_dataset(_read(name, source), parse_options(SourceOptions, options or {}, name), fingerprint)


def dataset_fingerprint(name: str, source: str | None = None, options: Mapping[str, Any] | None = None) -> str:
    """Digest of name, options (defaults filled in) and the source files' sizes and mtimes; reads no data."""
    parsed: SyntheticOptions | SourceOptions
    if name == "synthetic":
        parsed = parse_options(SyntheticOptions, options or {}, name)
    else:
        parsed = parse_options(SourceOptions, options or {}, name)
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in source_files(source)] if name == "file" else []
    text = json.dumps([_GENERATION, name, asdict(parsed), files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(name: str, source: str | None) -> RawGraph:
    if name == "file":
        return read_files(source)
    # torch is heavy, and only these need it
    if name.startswith("ogbn-"):
        from trainer.data.ogb import read_ogb

        return read_ogb(name, source)
    from trainer.data.pyg import read_pyg

    return read_pyg(name, source)
