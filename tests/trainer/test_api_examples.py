"""Tests that the examples in the docstrings of the public API run, on small graphs."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import gnnfleet as gf
from trainer.partition.make import PartitionSpec, make_partition

SIZE = {"num_nodes": 600, "avg_degree": 6, "num_features": 8, "num_classes": 4, "train": 200}
HETERO = {"num_nodes": 800}
#: Examples that only compile here; test_connect.py and test_own_model.py run the functions.
NEEDS_MORE = ("gnnfleet connect", "gnnfleet load_model")


def examples() -> Iterator[tuple[str, str]]:
    """Return (name, code) of each example in the public docstrings."""
    seen: set[str] = set()
    for module in (gf, gf.nn, gf.tasks):
        for name in module.__all__:
            found = getattr(module, name)
            members = vars(found).items() if inspect.isclass(found) else ()
            for label, each in ((name, found), *((f"{name}.{key}", value) for key, value in members)):
                text = inspect.getdoc(each) if callable(each) else None
                for code in re.findall(r"```python\n(.*?)```", text or "", re.DOTALL):
                    if code not in seen:
                        seen.add(code)
                        yield f"{module.__name__} {label}", textwrap.dedent(code)


EXAMPLES = list(examples())


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("homogeneous", "heterogeneous")}
    for kind, dataset, options in (("homogeneous", "synthetic", SIZE), ("heterogeneous", "synthetic-hetero", HETERO)):
        target = str(folders[kind] / "parts")
        make_partition(PartitionSpec(dataset, target, None, options, 2, "random", clusters=20), say=lambda _: None)
    return folders


def test_most_public_names_have_an_example() -> None:
    assert len(EXAMPLES) > 50


@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_runs(name: str, code: str, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile(code, name, "exec")  # an example passes if it raises nothing; many assert what they show
    if name in NEEDS_MORE:
        return
    monkeypatch.chdir(parts["heterogeneous" if "heterogeneous" in code else "homogeneous"])
    exec(program, {"__name__": "example"})
