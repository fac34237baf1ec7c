"""Detects a file or folder of the user that shadows a package of gnnfleet."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def check_not_shadowed(package: str) -> None:
    """Raise ``ImportError`` if ``import package`` would import another package than the one installed with gnnfleet.

    Does not execute the module that Python would import.
    """
    own = Path(__file__).resolve().parents[1] / package
    spec = find_spec(package)
    if spec is None:
        raise ImportError(f"gnnfleet's package `{package}` is not in {own.parent}; install gnnfleet again")
    found = Path(spec.origin if spec.origin else next(iter(spec.submodule_search_locations or ())))
    if found.resolve() not in (own / "__init__.py", own):
        raise ImportError(
            f"{found} shadows gnnfleet's own package `{package}` ({own}): Python finds it first. Rename that file or"
            " folder, or remove its parent folder from sys.path"
        )
