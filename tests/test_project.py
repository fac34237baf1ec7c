"""Tests of packaging and of the repository's files."""

from __future__ import annotations

import configparser
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gnnfleet
import launcher

REPOSITORY = Path(__file__).resolve().parents[1]
#: Absolute paths that exist on one machine only; /tmp, /usr and examples below /home are allowed.
PRIVATE_PATH = re.compile(r"(?<![\w./~}-])/(work|farm|Users)/[\w.-]+")


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := REPOSITORY / name).is_file()]


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    return parser


def words(text: str) -> list[str]:
    """Return the names of the packages in a list of requirements."""
    return [re.split(r"[<>=;\[ ]", line)[0].lower().replace("_", "-") for line in text.split("\n") if line.strip()]


def test_no_path_of_one_machine_is_in_the_repository() -> None:
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found += [f"{path.relative_to(REPOSITORY)}:{number}: {hit[0]}" for hit in PRIVATE_PATH.finditer(line)]
    assert found == []


def test_one_version_everywhere() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert setup()["metadata"]["version"] == "attr: launcher.__version__"
    assert launcher.__version__ == gnnfleet.__version__ == newest.group(1)


def test_licence_is_apache_2_in_full() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert setup()["metadata"]["license"] == "Apache-2.0"


def test_constraints_pin_every_direct_dependency() -> None:
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+", line) for line in lines if line)
    options = setup()
    wanted = words(options["options"]["install_requires"]) + words(options["options.extras_require"]["test"])
    assert set(wanted) <= set(words("\n".join(lines)))


def test_all_packages_are_packaged() -> None:
    # Every folder with Python files has an `__init__.py`; setuptools would leave out a folder without one.
    for package in ("gnnfleet", "launcher", "trainer"):
        folders = {path.parent for path in (REPOSITORY / package).rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_launch_py_runs_from_another_folder(tmp_path: Path) -> None:
    argv = [sys.executable, REPOSITORY / "launch.py", "--help"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--config" in done.stdout and "launch.py" in done.stdout, done.stderr


def test_launch_py_names_a_missing_dependency(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-S", REPOSITORY / "launch.py", "--help"]  # -S: no site-packages
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "click is not installed" in done.stderr and f"pip install -e {REPOSITORY}" in done.stderr


def test_console_script_runs_the_same_program() -> None:
    target = setup()["options.entry_points"]["console_scripts"].strip().partition(" = ")[2]
    module, _, function = target.partition(":")
    assert f"from {module} import {function} as" in (REPOSITORY / "launch.py").read_text()
    assert callable(getattr(importlib.import_module(module), function))
