"""Loads the class that ``train.model`` names, and makes a model of it by the names in its signatures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from trainer.core.errors import SettingsError

#: Arguments of a constructor that the trainer knows; a class gets those that its signature names.
CONSTRUCTOR_NAMES = (
    "in_channels", "hidden_channels", "out_channels", "num_layers", "metadata", "edge_dim", "dropout", "heads", "deg",
)  # fmt: skip

#: Arguments of ``forward`` for a graph with one type of nodes and edges.
PLAIN_NAMES = (
    "x", "edge_index", "edge_weight", "edge_attr", "batch_size", "num_sampled_nodes", "num_sampled_edges",
)  # fmt: skip

#: Arguments of ``forward`` for a graph with types: mappings by node type or edge type.
TYPED_NAMES = (
    "x_dict", "edge_index_dict", "edge_weight_dict", "edge_attr_dict", "batch_size", "num_sampled_nodes_dict",
    "num_sampled_edges_dict",
)  # fmt: skip


def load_class(model: str, folders: Sequence[Path] = ()) -> type[nn.Module]:
    """Import the class that ``model`` names: ``FILE.py:CLASS``, or ``PACKAGE.CLASS`` of an installed package.

    ``folders``: where the file is looked for; default: the current folder. The file can import its siblings.

    Raises ``SettingsError`` if there is no such file, module or class, if it is no ``torch.nn.Module``, or if its
    import fails.
    """
    if ":" in model:
        name, _, attribute = model.rpartition(":")
        paths = [folder / each for folder in folders or [Path()] for each in (name, Path(name).name)]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise SettingsError(f"model: there is no file {name} in {paths[0].parent.absolute()}")
        module = _imported(model, lambda: _module_of_file(path))
    else:
        name, _, attribute = model.rpartition(".")
        module = _imported(model, lambda: importlib.import_module(name))
    found = getattr(module, attribute, None)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        classes = [
            key for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
        ]  # fmt: skip
        known = f"; it has {', '.join(classes)}" if classes and ":" in model else ""
        what = "is no class of torch.nn.Module" if found is not None else "does not exist"
        raise SettingsError(f"model: {attribute} in {name} {what}{known}")
    return found


def _module_of_file(path: Path) -> ModuleType:
    folder, name = str(path.resolve().parent), path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script, so that it finds its siblings
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if known is None:
        sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is None:
            del sys.modules[name]
        raise
    return module


def _imported(model: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except Exception as error:  # the user's code runs
        raise SettingsError(f"model: {model} cannot be imported: {in_words(error)}") from error


def in_words(error: BaseException) -> str:
    """Return an error of a user's code in one line, with file and line of the innermost frame outside of libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_ours(frame.filename)]
    own = [frame for frame in own if not frame.filename.startswith("<") and "/lib/python" not in frame.filename]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({Path(error.filename).name}:{error.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(Path(__file__).parents[2])


def save_sources(cls: type, folder: Path) -> None:
    """Copy the file of a class and the modules beside it that are imported to ``folder``, unless they are there.

    Does nothing for a class of an installed package. Raises OSError.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or inspect.getfile(cls)
    top = Path(file).resolve().parent
    if "." in cls.__module__ or "site-packages" in top.parts or top.is_relative_to(folder.resolve()):
        return
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or "/")
        inside = path.suffix == ".py" and path.is_relative_to(top)
        if inside and not {"site-packages", ".venv"} & set(path.parts) and not _is_ours(str(path)):
            target = folder / path.relative_to(top)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def constructor_args(cls: type[nn.Module], offered: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments to construct ``cls``: those of ``offered`` that it names, and ``given``.

    Raises ``SettingsError`` for a required argument that is in neither, and for one in ``given`` that it lacks.
    """
    parameters = _parameters(cls)
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [name for name in given if name not in parameters and not any_name]
    if unknown:
        raise SettingsError(f"model_args: {cls.__name__} has no argument {unknown[0]!r}; it has {_list(parameters)}")
    named = {*parameters, *_of_convolution(cls)}
    found = {name: value for name, value in offered.items() if name in named and value is not None} | dict(given)
    required = [
        name for name, each in parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]  # fmt: skip
    required += ["deg"] if "deg" in _of_convolution(cls) else []
    missing = [name for name in required if name not in found and name not in offered]
    if missing:
        raise SettingsError(
            f"model: {cls.__name__} needs the argument {missing[0]!r}, which the trainer does not know; give it in "
            f"model_args, or use one of {', '.join(CONSTRUCTOR_NAMES)}"
        )
    if absent := [name for name in required if name not in found]:
        raise SettingsError(
            f"model: {cls.__name__} needs {absent[0]!r}, which this graph does not have{_why(absent[0])}"
        )
    return found


def _why(name: str) -> str:
    return "; set edge_attr to an edge attribute" if name == "edge_dim" else ""


def _of_convolution(cls: type) -> Collection[str]:
    """Return names that torch_geometric's models pass on to their convolutions."""
    from torch_geometric.nn.models.basic_gnn import GAT, PNA

    if issubclass(cls, PNA):
        return ("deg", "edge_dim", "aggregators", "scalers")
    return ("heads", "edge_dim") if issubclass(cls, GAT) else ()


def reads_degrees(cls: type[nn.Module]) -> bool:
    """Return whether a class is constructed with the numbers of nodes by in-degree (``deg``)."""
    return "deg" in {*_parameters(cls), *_of_convolution(cls)}


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _list(names: Collection[str]) -> str:
    return ", ".join(names) or "none"


def forward_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the arguments of ``forward`` that the trainer passes: of ``PLAIN_NAMES`` or ``TYPED_NAMES``, or ``batch``.

    Raises ``SettingsError`` for a required argument that the trainer does not know.
    """
    parameters = _parameters(cls.forward)
    parameters.pop("self", None)
    values = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    required = [each.name for each in values if each.default is each.empty]
    if required == ["batch"]:
        return ("batch",)
    names = [each.name for each in values]
    known = TYPED_NAMES if {"x_dict", "edge_index_dict"} & set(names) else PLAIN_NAMES
    if missing := [name for name in required if name not in known]:
        raise SettingsError(
            f"model: forward of {cls.__name__} needs the argument {missing[0]!r}, which the trainer does not know; it "
            f"passes {', '.join(PLAIN_NAMES)}, for typed graphs {', '.join(TYPED_NAMES)}, or `batch` alone"
        )
    if not set(names) & {"x", "x_dict", "edge_index", "edge_index_dict"}:
        raise SettingsError(f"model: forward of {cls.__name__} has no argument x and edge_index, x_dict and "
                            "edge_index_dict, or batch")  # fmt: skip
    return tuple(name for name in names if name in known)


def check_class(model: str, model_args: Mapping[str, Any], folders: Sequence[Path] = ()) -> None:
    """Check that the trainer can make and call the class ``model``, without a graph. Raises ``SettingsError``."""
    cls = load_class(model, folders)
    constructor_args(cls, dict.fromkeys(CONSTRUCTOR_NAMES, 1), model_args)
    forward_names(cls)


def takes_types(cls: type[nn.Module], hetero: bool) -> bool:
    """Return whether ``forward`` of a class reads a typed graph as it is. ``hetero``: whether the graph has types."""
    names = forward_names(cls)
    return names == ("batch",) if "batch" in names and hetero else "x_dict" in names or "edge_index_dict" in names
