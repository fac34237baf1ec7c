"""Prints the files, lines, short files and import cycles of each package (`make size`).

python tests/code_size.py [CHECKOUT]     default: this checkout
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from import_graph import circles, module_graph, package_graph, read_modules

SHORT = 60  #: lines; a shorter file needs a reason


def size_report(repository: Path) -> str:
    lines = [f"{'package':28}{'files':>6}{'lines':>8}{'median':>8}{f'under {SHORT}':>10}"]
    lengths: dict[str, list[int]] = {}
    modules = read_modules(repository)
    short = []
    for module in modules.values():
        count = len(module.path.read_text().splitlines())
        for package in dict.fromkeys((f"{module.name.split('.')[0]}, all", module.package, "all")):
            lengths.setdefault(package, []).append(count)
        if count < SHORT and not (module.path.name == "__init__.py" and len(module.body) < 2):
            short.append(f"{module.path.relative_to(repository)} ({count})")
    lines += [_row(package, lengths[package]) for package in sorted(lengths, key=lambda name: (name == "all", name))]
    for title, graph in (("packages", package_graph(modules)), ("files", module_graph(modules))):
        found = circles(graph)
        lines += [f"\nimport circles among {title}: {len(found)}", *(f"  {', '.join(group)}" for group in found)]
    lines += [
        f"\nfiles under {SHORT} lines, less those with a docstring only: {len(short)}",
        *(f"  {name}" for name in short),
    ]
    return "\n".join(lines)


def _row(package: str, lengths: Sequence[int]) -> str:
    short = sum(length < SHORT for length in lengths)
    return f"{package:28}{len(lengths):6}{sum(lengths):8}{median(lengths):8.0f}{short:10}"


if __name__ == "__main__":
    print(size_report(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1]))
