"""Tests of README and docs: every YAML block loads, every command parses, every link and name exists."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml

import gnnfleet as gf
from launcher import errors
from launcher.cli.main import gnnfleet, run, with_all_commands
from launcher.cli.serve import serve
from launcher.config.loader import load_config
from trainer.cli import cli

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *(REPOSITORY / "docs").glob("*.md")])
PROGRAMS = (["python", "launch.py"], ["python3", "launch.py"], ["launch.py"], ["./launch.py"], ["gnnfleet"])
MINIMAL = {"nodes": ["me@host1", "me@host2"], "data": {"dataset": "synthetic"}}
LAUNCHES = ("plan", "launch")
PROSE = ["README.md", "docs/operating.md", "docs/server_client.md"]
with_all_commands()


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^ *```(\w+)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], textwrap.dedent(match[2])))
    return [block for block in found if block.language in languages]


def commands() -> list[tuple[Block, list[str]]]:
    return [
        (block, words)
        for block in blocks("bash", "sh", "shell", "console")
        for line in block.text.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line.removeprefix("$ "), comments=True))
    ]


def launches() -> list[tuple[Block, list[str]]]:
    found = ((block, words, [each for each in PROGRAMS if words[: len(each)] == each]) for block, words in commands())
    return [(block, words[len(program[0]) :]) for block, words, program in found if program]


@pytest.mark.parametrize("block", blocks("yaml", "yml"), ids=str)
def test_yaml_loads(block: Block, tmp_path: Path) -> None:
    written = yaml.safe_load(block.text)
    missing = {key: value for key, value in MINIMAL.items() if key not in written}
    for name in (written.get("run") or {}).get("files", ()):
        (tmp_path / name).mkdir(parents=True)
    file = tmp_path / "cluster.yml"
    file.write_text(block.text + (yaml.safe_dump(missing) if missing else ""))
    assert load_config(file).nodes


@pytest.mark.parametrize(("block", "words"), launches(), ids=lambda value: " ".join(map(str, value))[:60])
def test_launch_commands_are_valid(
    block: Block, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A launch succeeds as a dry run in a folder with the files that it names; other commands only need to parse.
    put_named_files(words, tmp_path)
    monkeypatch.chdir(tmp_path)
    if words[0] in gnnfleet.commands and words[0] not in LAUNCHES:
        parse(before_own(words))
        return
    ours, own = before_own(words), words[len(before_own(words)) :]
    status = run([*ours, *([] if words[0] == "plan" or "--dry-run" in ours else ["--dry-run"]), *own])
    assert status == 0, f"{block}: {shlex.join(words)}\n{capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("block", "words"),
    [(block, words[3:]) for block, words in commands() if words[:3] == ["python", "-m", "trainer"]],
    ids=lambda value: " ".join(map(str, value))[:60],
)
def test_trainer_commands_parse(block: Block, words: list[str]) -> None:
    command, context = cli, click.Context(cli)
    try:
        while isinstance(command, click.Group):
            _, command, words = command.resolve_command(context, list(words))
        command.make_context(command.name, list(words))
    except click.UsageError as error:
        pytest.fail(f"{block}: {shlex.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_import_modules_that_exist(block: Block) -> None:
    for statement in ast.walk(ast.parse(block.text)):
        if isinstance(statement, ast.ImportFrom) and statement.module == "gnnfleet":
            assert {each.name for each in statement.names} <= set(gf.__all__)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.module and statement.module.split(".")[0] not in ("trainer", "launcher")
        elif isinstance(statement, ast.Import):
            assert {each.name for each in statement.names}.isdisjoint({"trainer", "launcher"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_gnnfleet_in_pages_exist(page: Path) -> None:
    for name in re.findall(r"(?<![\w/.])(?:gf|gnnfleet)\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)", page.read_text()):
        found: object = gf
        for word in name.split("."):
            assert word in getattr(found, "__all__", dir(found)), name
            found = getattr(found, word)


def put_named_files(words: list[str], folder: Path) -> None:
    for word in words:
        path = folder / word
        if path.suffix in (".yml", ".yaml", ".py"):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".yml", ".yaml"):
            text = (REPOSITORY / word).read_text() if (REPOSITORY / word).exists() else yaml.safe_dump(MINIMAL)
            path.write_text(text)
            for name in (yaml.safe_load(text).get("run") or {}).get("files", ()):
                (path.parent / name).mkdir(parents=True, exist_ok=True)
        elif path.suffix == ".py":
            path.touch()


def before_own(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


def test_commands_name_targets_and_files_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+)=", (REPOSITORY / "run_dist.sh").read_text(), re.MULTILINE))
    for block, words in commands():
        given = [word.partition("=")[0] for word in words if re.match(r"[A-Z_]+=", word)]
        command = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if command[:1] == ["make"]:
            assert set(command[1:]) <= targets, f"{block}: {shlex.join(words)}"
        elif command and command[0].startswith("./"):
            assert (REPOSITORY / command[0]).exists(), f"{block}: {command[0]}"
        if command[:1] == ["./run_dist.sh"]:
            assert set(given) <= variables, f"{block}: {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [each for each in targets if "://" not in each and not (page.parent / each).exists()]
    assert missing == []


#: Files that may name our files and modules: all pages except the logs, and the source.
NAMING = [
    *(page for page in PAGES if page.name != "CHANGELOG.md" and page.name != "LOG.md"),
    REPOSITORY / "Makefile",
    *(path for folder in ("templates", "examples") for path in (REPOSITORY / folder).iterdir() if path.is_file()),
    *(path for top in ("launcher", "trainer", "gnnfleet", "benchmarks") for path in (REPOSITORY / top).rglob("*.py")),
]
FOLDERS = ("launcher", "trainer", "gnnfleet", "benchmarks", "examples", "templates", "tests", "docs")


def test_files_and_modules_named_in_pages_exist() -> None:
    files = {path.relative_to(REPOSITORY).as_posix() for top in FOLDERS for path in (REPOSITORY / top).rglob("*.*")}
    missing = []
    for page in NAMING:
        text = page.read_text()
        named = set(re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w/-]+\.(?:py|yml|md|j2|css|js))\b", text))
        if page.suffix == ".md":
            named |= set(
                re.findall(r"`([\w-]+/[\w/-]+\.py)\b", text)
            )  # pages may write `node/x.py` for launcher/node/x.py
        missing += [
            f"{page.name}: {name}" for name in named if not any(f"/{each}".endswith(f"/{name}") for each in files)
        ]
        dotted = set(re.findall(r"`((?:launcher|trainer)(?:\.(?!py\b)\w+)+)(?:\(\))?`", text))
        missing += [f"{page.name}: {name}" for name in dotted if not _is_defined(name)]
    assert missing == []


def _is_defined(name: str) -> bool:
    """Return whether a dotted name is a module, or a module followed by one or two names that its source contains."""
    words = name.split(".")
    for cut in range(len(words), max(len(words) - 3, 0), -1):
        path = REPOSITORY.joinpath(*words[:cut])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return all(re.search(rf"\b{word}\b", file.read_text()) for word in words[cut:])
    return False


def test_readme_begins_with_the_two_commands() -> None:
    first = next(block for block in blocks("bash") if block.page.name == "README.md")
    assert [words for block, words in commands() if block == first] == [["make", "demo"], ["make", "test"]]
    assert first.line < 15


def test_exit_statuses_are_documented() -> None:
    page = (REPOSITORY / "docs/operating.md").read_text()
    for error in (errors.FleetError, errors.ConfigError, errors.PreflightRefused, errors.Interrupted):
        assert re.search(rf"\| {error.exit_status} \|", page), error


@pytest.mark.parametrize("page", PROSE)
def test_prose_names_only_options_that_exist(page: str) -> None:
    prose = re.findall(r"`(--[a-z_-]+)", (REPOSITORY / page).read_text())
    commands = [gnnfleet, *gnnfleet.commands.values(), *serve.commands.values()]
    options = {option for command in commands for parameter in command.params for option in parameter.opts}
    assert {word.replace("_", "-") for word in prose} - options - {"--help"} == {"--"} & set(prose)


@pytest.mark.parametrize("page", [*PROSE, "docs/troubleshooting.md", "docs/first_cluster.md", "docs/migrating.md"])
def test_commands_in_prose_and_tables_parse(page: str) -> None:
    command_lines = re.findall(r"`gnnfleet ([^`]+)`", (REPOSITORY / page).read_text())
    for words in map(shlex.split, command_lines):
        if words[0] != "COMMAND":
            parse(words)
    assert command_lines or page in ("README.md", "docs/first_cluster.md")


def test_every_command_has_an_example_that_parses() -> None:
    for name, command in gnnfleet.commands.items():
        examples = re.findall(r"^  gnnfleet (.+)$", command.epilog or "", re.MULTILINE)
        assert any(example.split()[0] == name for example in examples), f"{name} --help shows no example"
        for words in map(shlex.split, examples):
            parse(before_own(words))


TEMPLATES = sorted((REPOSITORY / "templates").glob("*.yml"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_commands_in_templates_parse_and_name_the_template(template: Path) -> None:
    text = template.read_text().replace("\\\n#", "")
    lines = re.findall(r"^#   ((?:python launch\.py|gnnfleet) .*?)(?: {2,}.*)?$", text, re.MULTILINE)
    for words in map(shlex.split, lines):
        words = before_own(words[2:] if words[0] == "python" else words[1:])
        parse(words)
        assert template.name in [Path(word).name for word in words]


def parse(words: list[str]) -> None:
    """Parse arguments of ``gnnfleet``. If they do not begin with a command, the command is ``launch``."""
    name = words[0] if words[0] in gnnfleet.commands else "launch"
    command, words = gnnfleet.commands[name], words[1:] if words[0] == name else list(words)
    if isinstance(command, click.Group) and words and words[0] in command.commands:
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)
