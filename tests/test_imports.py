"""Tests that packages import only lower ones, in the order of docs/ARCHITECTURE.md."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

from import_graph import circles, imported, module_graph, package_graph, reached, read_modules

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = read_modules(REPOSITORY)

#: Packages from bottom to top; each may import only packages before it, also inside functions.
ORDER = {
    "launcher": (
        "errors", "command", "hostlist", "files", "text", "yaml_tree", "node", "config", "transport",
        "plan", "export", "preflight", "report", "sync", "run", "manage", "serving", "sweep", "setup", "rehearse",
        "init", "cli",
    ),
    "trainer": (
        "core", "wire", "store", "data", "sources", "partition", "sampler", "cuda", "service", "graph", "loader", "nn",
        "own", "track", "train", "infer", "cli",
    ),
    "gnnfleet": ("shadow", "nn", "tasks"),
}  # fmt: skip
#: Packages that no module of a package may import.
FOREIGN = {
    "launcher": ["gnnfleet", "trainer", "torch", "torch_geometric", "numba", "numpy", "pymetis", "ogb"],
    "trainer": ["gnnfleet", "launcher", "paramiko", "fabric", "libtmux"],
    "trainer.core.errors": ["torch"],
    "trainer.core.rng": ["torch"],
    "trainer.core.arrays": ["torch"],
}
#: Modules of the trainer that ``launcher`` imports: the settings that it writes and the trainer reads, and how JSON is
#: read. They need the standard library and msgspec only.
SHARED = {
    "trainer.core.errors", "trainer.core.fields", "trainer.core.remote_settings", "trainer.core.train_config",
    "trainer.core.typed",
}  # fmt: skip
#: Installed packages that a module of launcher.node may import.
PACKAGES_ON_NODES = {
    "launcher.node.remote_folder": ["fsspec"],
    "launcher.node.supervisor.prometheus": ["prometheus_client"],
}
#: Features whose modules a launch, or a training job, imports only if they are used.
LOADED_WHEN_USED = {
    "launcher.run.launch": {
        "report.html": "launcher.report.html",
        "Slurm": "launcher.transport.slurm launcher.transport.slurm_client launcher.run.batch_job launcher.plan.sbatch "
        "launcher.config.allocation",
        "SSH": "launcher.transport.ssh launcher.transport.openssh launcher.transport.auth launcher.transport.fallback",
        "data.store": "launcher.sync.parts_store launcher.sync.store_progress launcher.node.store "
        "launcher.node.remote_folder launcher.config.store_consistency launcher.preflight.store_access",
        "files of other launchers": "launcher.config.importers launcher.run.config_of_options",
        "own commands and models": "launcher.plan.own_script",
        "wrap": "launcher.plan.wrap launcher.preflight.check_container",
        "data.mode: verify": "launcher.sync.verify_parts launcher.preflight.shared_folder",
        "train.track": "launcher.plan.tracking",
        "run.notify": "launcher.preflight.notices launcher.node.programs.notify",
        "run.encrypt": "launcher.plan.service_key",
        "--nodes-needed, --include": "launcher.run.choose_hosts launcher.config.host_filter",
        "--wait": "launcher.report.waiting",
        "GPUs, bfloat16": "launcher.plan.device_sampling launcher.plan.precision",
        "commands on runs, serving, sweeps": "launcher.manage launcher.serving launcher.sweep launcher.report.verdict "
        "launcher.report.compare launcher.report.run_history",
    },
    "trainer.train.job": {
        "other hosts, clients": "trainer.service trainer.graph.connect trainer.store.client_store",
        "GPUs": "trainer.cuda trainer.nn.kernels.cuda_sums trainer.nn.kernels.cuda_elements",
        "train.track": "trainer.track.start trainer.track.follow trainer.track.tensorboard "
        "trainer.track.wandb trainer.track.mlflow",
        "classes of users": "trainer.own",
        "graphs with types": "trainer.nn.hetero_models trainer.nn.hetero_layers trainer.nn.lightgcn",
        "token-transformer": "trainer.nn.token_transformer",
        "links": "trainer.nn.links trainer.nn.link_model trainer.nn.link_metrics trainer.nn.relation_decoders "
        "trainer.train.tasks.link trainer.train.full_ranking trainer.loader.link_block_loader "
        "trainer.loader.typed_link_loader",
        "labels of edges": "trainer.nn.edge_model trainer.loader.edge_block_loader",
        "PPR, walks": "trainer.sampler.ruled_hops trainer.sampler.push_kernels trainer.sampler.in_edges",
        "train.start": "trainer.train.start",
        "making parts": "trainer.data trainer.sources trainer.partition",
        "loaders of torch_geometric's batches": "trainer.loader.pyg_loader trainer.loader.pyg_batch",
        "predictions": "trainer.infer trainer.nn.layerwise_inference",
    },
}
#: Modules that users import or run; no other module imports them.
ENTRIES = {"launcher.__main__", "trainer.__main__"}


@cache
def imports_of(module: str) -> set[str]:
    return set(imported(MODULES[module], MODULES))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    """Return the position of a module's package in ``ORDER``. Other modules come last."""
    top, _, rest = module.partition(".")
    head = rest.split(".")[0]
    assert not rest or head in ORDER[top] or module in ENTRIES, f"{module} has no place in ORDER"
    return ORDER[top].index(head) if head in ORDER[top] else len(ORDER[top])


def test_packages_import_only_packages_below_them() -> None:
    upward = [
        f"{module} imports {name}"
        for module in MODULES
        for name in sorted(imports_of(module) & MODULES.keys())
        if name.split(".")[0] == module.split(".")[0] and name not in ORDER and layer(name) > layer(module)
    ]
    assert upward == []


@pytest.mark.parametrize("package", FOREIGN)
def test_foreign_packages_are_not_imported(package: str) -> None:
    assert any(within(module, package) for module in MODULES), f"{package} is gone; correct FOREIGN"
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if within(module, package)
        for name in imports_of(module) - (SHARED if package == "launcher" else set())
        if any(within(name, other) for other in FOREIGN[package])
    ]
    assert wrong == []


def test_what_the_launcher_shares_with_the_trainer_needs_no_package_but_msgspec() -> None:
    for module in SHARED:
        assert {name for name in imports_of(module) if name.split(".")[0] not in sys.stdlib_module_names} <= {
            *SHARED,
            "msgspec",
        }


def test_node_programs_use_the_standard_library_only() -> None:
    for module in (name for name in MODULES if within(name, "launcher.node")):
        allowed = {*sys.stdlib_module_names, "__future__", *PACKAGES_ON_NODES.get(module, ())}
        for name in imports_of(module):
            assert name.split(".")[0] in allowed or within(name, "launcher.node"), f"{module} imports {name}"


def test_no_import_cycles_among_packages_or_files() -> None:
    assert circles(package_graph(MODULES)) == []
    assert circles(module_graph(MODULES)) == []


@pytest.mark.parametrize(("start", "most"), [("launcher.run.launch", 90), ("trainer.train.job", 97)])
def test_features_are_imported_where_they_are_used(start: str, most: int) -> None:
    loaded = reached(module_graph(MODULES, loaded=True), start)
    features = LOADED_WHEN_USED[start]
    for feature, packages in features.items():
        for package in packages.split():
            assert any(within(module, package) for module in MODULES), f"{package} is gone; correct LOADED_WHEN_USED"
            needless = [module for module in loaded if within(module, package)]
            assert needless == [], f"{start} imports what only {feature} needs; import it inside a function"
    assert len(loaded) <= most, f"{start} imports {len(loaded)} modules; `make size` says how many it did before"


def test_import_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"f", "a"}}
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_imports_of_benchmarks_and_examples_exist() -> None:
    # Every import in benchmarks/ and examples/ exists; needed because no test runs all of these files.
    files = [path for folder in ("benchmarks", "examples") for path in (REPOSITORY / folder).rglob("*.py")]
    missing = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {node.module}.{alias.name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ORDER
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES and alias.name not in defined(node.module or "")
    ]
    assert missing == []


def defined(module: str) -> set[str]:
    """Return the names that a module defines or imports, and all its string constants."""
    if module not in MODULES:
        return set()
    names = set()
    for node in (inner for outer in MODULES[module].body for inner in ast.walk(outer)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # a name in __all__
    return names
