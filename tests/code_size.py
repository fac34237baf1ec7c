"""Prints how large the project is (`make size`): files, lines, public names, functions and import cycles.

python tests/code_size.py [CHECKOUT]     default: this checkout
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median, quantiles

from import_graph import Module, circles, module_graph, package_graph, reached, read_modules

SHORT = 60  #: lines; a shorter file needs a reason
LONG = 80  #: lines of a function that reads downwards
TINY = 5  #: lines; a helper of so few that is used once is better inlined
STARTS = ("launcher.run.launch", "trainer.train.job")
FEATURES = ("slurm", "serving", "restart", "cuda")


def size_report(repository: Path) -> str:
    modules = read_modules(repository)
    text = {name: module.path.read_text() for name, module in modules.items()}
    lines = {name: len(source.splitlines()) for name, source in text.items()}

    # files and lines of each package
    report = [f"{'package':28}{'files':>6}{'lines':>8}{'median':>8}{f'under {SHORT}':>10}"]
    lengths: dict[str, list[int]] = {}
    for name, module in modules.items():
        for package in dict.fromkeys((f"{name.split('.')[0]}, all", module.package, "all")):
            lengths.setdefault(package, []).append(lines[name])
    for package in sorted(lengths, key=lambda name: (name == "all", name)):
        found = lengths[package]
        short = sum(length < SHORT for length in found)
        report.append(f"{package:28}{len(found):6}{sum(found):8}{median(found):8.0f}{short:10}")

    # names and functions of the launcher and of the trainer
    report.append(
        f"\n{'':12}{'public names':>14}{'functions':>11}{'median':>8}{'95th %':>8}{f'over {LONG}':>9}"
        f"{'private, used once':>20}{f'of at most {TINY} lines':>20}"
    )
    for top in ("launcher", "trainer", "gnnfleet"):
        report.append(_functions_row(top, {name: m for name, m in modules.items() if name.split(".")[0] == top}, text))

    # what the two main paths reach, and how many files know a feature
    graph = module_graph(modules)
    report.append("")
    for start in STARTS:
        for what, imports in (("imports", module_graph(modules, loaded=True)), ("  with all features", graph)):
            names = reached(imports, start) | {start} if start in imports else set()
            report.append(f"{start} {what} {len(names)} modules, {sum(lines[name] for name in names):,} lines")
    knowing = (f"{word} {sum(word in source.lower() for source in text.values())}" for word in FEATURES)
    report.append(f"files that know {', '.join(knowing)}")
    for what, files in (("tests", "tests/**/*.py"), ("explanations.yml", "launcher/report/explanations.yml")):
        report.append(f"{what}: {sum(len(file.read_text().splitlines()) for file in repository.glob(files)):,} lines")

    for title, imports in (("packages", package_graph(modules)), ("files", graph)):
        groups = circles(imports)
        report += [f"\nimport circles among {title}: {len(groups)}", *(f"  {', '.join(group)}" for group in groups)]
    short_files = [
        f"  {module.path.relative_to(repository)} ({lines[name]})"
        for name, module in modules.items()
        if lines[name] < SHORT and not (module.path.name == "__init__.py" and len(module.body) < 2)
    ]
    report += [f"\nfiles under {SHORT} lines, less those with a docstring only: {len(short_files)}", *short_files]
    return "\n".join(report)


def _functions_row(top: str, modules: Mapping[str, Module], text: Mapping[str, str]) -> str:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    public = 0
    functions, once = [], []
    for name, module in modules.items():
        public += sum(isinstance(node, (*kinds, ast.ClassDef)) and node.name[0] != "_" for node in module.body)
        for node in (node for statement in module.body for node in ast.walk(statement) if isinstance(node, kinds)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            functions.append(length)
            if node.name.startswith("_") and not node.name.endswith("__") and not node.decorator_list:
                if len(re.findall(rf"\b{node.name}\b", text[name])) == 2:  # its definition and its only use
                    once.append(length)
    high = quantiles(functions, n=20)[-1] if len(functions) > 1 else 0
    return (
        f"{top:12}{public:14,}{len(functions):11,}{median(functions or [0]):8.0f}{high:8.0f}"
        f"{sum(length > LONG for length in functions):9}{len(once):20,}{sum(length <= TINY for length in once):20,}"
    )


if __name__ == "__main__":
    print(size_report(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1]))
