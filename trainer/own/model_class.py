"""Loads the class that ``train.model`` names, and makes a model of it by the names in its signatures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
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
_CONSTRUCTOR_NAMES = (
    "in_channels", "hidden_channels", "out_channels", "num_layers", "metadata", "edge_dim", "dropout", "heads", "deg",
)  # fmt: skip

#: Arguments of ``forward`` for a graph with one type of nodes and edges.
_PLAIN_NAMES = (
    "x", "edge_index", "edge_weight", "edge_attr", "batch_size", "num_sampled_nodes", "num_sampled_edges",
)  # fmt: skip

#: Arguments of ``forward`` for a graph with types: mappings by node type or edge type.
_TYPED_NAMES = (
    "x_dict", "edge_index_dict", "edge_weight_dict", "edge_attr_dict", "batch_size", "num_sampled_nodes_dict",
    "num_sampled_edges_dict",
)  # fmt: skip


#: Folders from which classes have been loaded, the last one last. Their modules make way for those of other folders.
_FOLDERS: list[Path] = []


def load_class(model: str, folders: Sequence[Path] = ()) -> type[nn.Module]:
    """Import the class that ``model`` names: ``FILE.py:CLASS``, or ``PACKAGE.CLASS`` of an installed package.

    ``folders``: where the file is looked for; default: the current folder. The file can import the modules beside it,
    and, in a package, relatively.

    Raises ``SettingsError`` if there is no such file, module or class, if it is no ``torch.nn.Module``, or if its
    import fails.
    """
    if ":" in model:
        name, _, attribute = model.rpartition(":")
        paths = [folder / each for folder in folders or [Path()] for each in (name, Path(name).name)]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise SettingsError(f"model: there is no file {name} in {paths[0].parent.absolute()}")
        module = _imported(model, lambda: _module_of_file(path.resolve()))
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
        what = "does not exist" if found is None else "is no class of torch.nn.Module"
        if inspect.isfunction(found):
            what = "is a function; give a class of torch.nn.Module whose constructor does what the function does"
        raise SettingsError(f"model: {attribute} in {name} {what}{known}")
    return found


def relative_name(model: str) -> str:
    """Return ``model`` with the path that its file has in a folder of kept sources, if it is an absolute one."""
    name, _, attribute = model.rpartition(":")
    if not Path(name).is_absolute():
        return model
    return f"{Path(name).relative_to(_top(Path(name))).as_posix()}:{attribute}"


def _top(path: Path) -> Path:
    """Return the folder of a file, or the folder that contains the package of a file."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _module_of_file(path: Path) -> ModuleType:
    top = _top(path)
    name = ".".join(path.relative_to(top).with_suffix("").parts)
    for known, other in [*sys.modules.items()] if _FOLDERS[-1:] != [top] else ():
        place = str(getattr(other, "__file__", None) or "")
        if any(_is_inside(place, folder) for folder in _FOLDERS):
            here = top.joinpath(*known.split("."))
            mine = (here.with_name(f"{here.name}.py"), here / "__init__.py")
            if Path(place) not in mine and any(file.is_file() for file in mine):
                del sys.modules[known]  # another version, such as one kept with a run; its classes stay as they are
    _FOLDERS[:] = [*(folder for folder in _FOLDERS if folder != top), top]
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"{name}_of_user"  # the file has the name of a library
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    sys.path.insert(0, str(top))  # as Python does for a script, so that it finds its siblings
    try:
        if "." in name:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        # Modules that libraries import later are not those beside the file.
        sys.path.remove(str(top))
        if str(top) not in sys.path:
            sys.path.append(str(top))


def _imported(model: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:  # the user's code runs
        remedy = ""
        if isinstance(error, ModuleNotFoundError):
            remedy = "; install it here and on all hosts, or put it beside the file"
        elif isinstance(error, ImportError) and error.name is None:  # a relative import
            remedy = "; make its folder a package by an empty file __init__.py, or import the module by its name"
        raise SettingsError(f"model: {model} cannot be imported: {in_words(error)}{remedy}") from error


def in_words(error: BaseException) -> str:
    """Return an error of a user's code in one line, with file and line of the innermost frame outside of libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_ours(frame.filename)]
    own = [frame for frame in own if not frame.filename.startswith("<") and "/lib/python" not in frame.filename]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        text, where = error.msg, f" ({Path(error.filename).name}:{error.lineno})"
    return f"{type(error).__name__}: {' '.join(text.split())}{where}"


def _is_ours(filename: str) -> bool:
    root = Path(__file__).parents[2]
    return any(Path(filename).is_relative_to(root / name) for name in ("trainer", "launcher", "gnnfleet"))


def _is_inside(file: str, top: Path) -> bool:
    """Return whether a module's file is one of a user below the folder ``top``."""
    # Text is compared, not paths, as thousands of modules are loaded.
    if not file.startswith(os.path.join(top, "")) or not file.endswith(".py"):
        return False
    return not {"site-packages", ".venv"}.intersection(Path(file).relative_to(top).parts) and not _is_ours(file)


def save_sources(cls: type, folder: Path) -> None:
    """Copy the file of a class and the modules beside it that are imported to ``folder``, unless they are there.

    Does nothing for a class of an installed package. Raises OSError.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or inspect.getfile(cls)
    top = _top(Path(file).resolve())
    if top not in _FOLDERS or top.is_relative_to(folder.resolve()):
        return
    for module in [*sys.modules.values()]:
        path = str(getattr(module, "__file__", None) or "")
        if _is_inside(path, top):
            target = folder / Path(path).relative_to(top)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def constructor_args(cls: type[nn.Module], offered: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments to construct ``cls``: those of ``offered`` that it names, and ``given``.

    A class with ``**kwargs`` also gets those that its base class names; without a base class, all.

    Raises ``SettingsError`` for a required argument that is in neither, and for one in ``given`` that it lacks.
    """
    parameters = _constructor_parameters(cls)
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [name for name in given if name not in parameters and not any_name]
    if unknown:
        known = ", ".join(parameters) or "none"
        raise SettingsError(f"model_args: {cls.__name__} has no argument {unknown[0]!r}; it has {known}")
    named = {*parameters, *_of_convolution(cls)}
    if any_name and not any(base.__module__.startswith("torch_geometric.") for base in cls.__mro__):
        named.update(_CONSTRUCTOR_NAMES)  # torch_geometric's models pass them on to convolutions, which take others
    found = {name: value for name, value in offered.items() if name in named and value is not None} | dict(given)
    required = [
        name for name, each in _parameters(cls).items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]  # fmt: skip
    required += ["deg"] if "deg" in _of_convolution(cls) else []
    missing = [name for name in required if name not in found and name not in offered]
    if missing:
        raise SettingsError(
            f"model: {cls.__name__} needs the argument {missing[0]!r}, which the trainer does not know; give it in "
            f"model_args, or use one of {', '.join(_CONSTRUCTOR_NAMES)}"
        )
    if absent := [name for name in required if name not in found]:
        hint = "; set edge_attr to an edge attribute" if absent[0] == "edge_dim" else ""
        raise SettingsError(f"model: {cls.__name__} needs {absent[0]!r}, which this graph does not have{hint}")
    return found


def _of_convolution(cls: type) -> Collection[str]:
    """Return names that torch_geometric's models pass on to their convolutions."""
    from torch_geometric.nn.models.basic_gnn import GAT, PNA

    if issubclass(cls, PNA):
        return ("deg", "edge_dim", "aggregators", "scalers")
    return ("heads", "edge_dim") if issubclass(cls, GAT) else ()


def reads_degrees(cls: type[nn.Module]) -> bool:
    """Return whether a class is constructed with the numbers of nodes by in-degree (``deg``)."""
    return "deg" in {*_constructor_parameters(cls), *_of_convolution(cls)}


def _constructor_parameters(cls: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor, with those of base classes to which it passes ``**kwargs`` on."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        if "__init__" not in vars(base):
            continue
        own = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        found = {name: each for name, each in found.items() if each.kind is not each.VAR_KEYWORD}
        found |= {name: each for name, each in list(own.items())[1:] if name not in found}
        if not any(each.kind is each.VAR_KEYWORD for each in own.values()):
            break
    return found


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def forward_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the arguments of ``forward`` that the trainer passes: plain names, names of typed graphs, or ``batch``.

    Raises ``SettingsError`` for a required argument that the trainer does not know.
    """
    parameters = _parameters(cls.forward)
    parameters.pop("self", None)
    values = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    required = [each.name for each in values if each.default is each.empty]
    if required == ["batch"]:
        return ("batch",)
    names = [each.name for each in values]
    known = _TYPED_NAMES if {"x_dict", "edge_index_dict"} & set(names) else _PLAIN_NAMES
    if missing := [name for name in required if name not in known]:
        raise SettingsError(
            f"model: forward of {cls.__name__} needs the argument {missing[0]!r}, which the trainer does not know; it "
            f"passes {', '.join(_PLAIN_NAMES)}, for typed graphs {', '.join(_TYPED_NAMES)}, or `batch` alone"
        )
    if not set(names) & {"x", "x_dict", "edge_index", "edge_index_dict"}:
        raise SettingsError(f"model: forward of {cls.__name__} has no argument x and edge_index, x_dict and "
                            "edge_index_dict, or batch")  # fmt: skip
    return tuple(name for name in names if name in known)


def check_class(model: str, model_args: Mapping[str, Any]) -> None:
    """Check that the trainer can make and call the class ``model``, without a graph. Raises ``SettingsError``."""
    cls = load_class(model)
    constructor_args(cls, dict.fromkeys(_CONSTRUCTOR_NAMES, 1), model_args)
    forward_names(cls)


def takes_types(cls: type[nn.Module], hetero: bool) -> bool:
    """Return whether ``forward`` of a class reads a typed graph as it is. ``hetero``: whether the graph has types."""
    names = forward_names(cls)
    return names == ("batch",) if "batch" in names and hetero else "x_dict" in names or "edge_index_dict" in names
