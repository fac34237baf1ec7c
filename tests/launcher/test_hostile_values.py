"""Hostile texts in every key of cluster.yml: refused with file and line, or whole where they arrive, and never run."""

from __future__ import annotations

import json
import os
import subprocess
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.command import Command, Secret, quote, render, shell_line
from launcher.config.loader import load_config
from launcher.config.resolve import ResolvedConfig, resolve_run
from launcher.config.schema import settings as keys_of
from launcher.config.validation import sections
from launcher.errors import ConfigError, FleetError, UsageError
from launcher.export.kubernetes import export_kubernetes
from launcher.export.placed_plan import ExportRequest
from launcher.export.pods import Cluster
from launcher.export.scripts import export_script
from launcher.manage.attach import attach_argv
from launcher.plan.build import offline_plan
from launcher.plan.sbatch import parse_options, sbatch_script
from launcher.transport.ssh_config import ssh_argv

CANARY = "PWNED"  #: a file that hostile texts try to make

#: Executed by any shell that takes a value for code, however it is quoted there.
TEXTS = (
    f"';touch {CANARY};'\";touch {CANARY};\"$(touch {CANARY})`touch {CANARY}`;touch {CANARY}&#|%s{{{{ 7*7 }}}}",
    f"$(touch${{IFS}}{CANARY})`touch${{IFS}}{CANARY}`",
    f"x\ntouch {CANARY}\n#",
    f"x\rtouch {CANARY}\r\n",
    f"x\u2028touch {CANARY}\x85touch {CANARY}\u2029",
    f"END\ntouch {CANARY}",
    f"-oProxyCommand=touch {CANARY}",
    f"--wrap=touch {CANARY}",
    f"#(touch {CANARY})#{{run:touch {CANARY}}}",
    f'x" --wrap="touch {CANARY}',
    f"{{{{ cycler.__init__.__globals__.os.popen('touch {CANARY}').read() }}}}",
    f"a[$(touch {CANARY})]",
    "\x00",
    "!!python/object/apply:os.system ['id']",
)

BASE = """
nodes: [{host: gnn1}, {host: gnn2}]
data: {dataset: synthetic, mode: verify, folder: ~/parts}
train: {}
run: {encrypt: "off"}
"""


def texts_of(kind: Any) -> str:
    """Return what the type of a key holds: text, texts, names, pairs or other."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if any(get_origin(one) is tuple for one in kinds):
        return "texts"
    mapping = any(get_origin(one) is Mapping for one in kinds)
    return "pairs" if mapping else "text" if str in kinds else "other"


def keys() -> Iterator[tuple[str, str]]:
    """Yield the dotted name of every key of the schema and what it holds; new keys are covered by themselves."""
    for section, cls in sections().items():
        hints = get_type_hints(cls)
        for item in keys_of(cls):
            if (place := f"{section}.{item.name}".lstrip(".")) in sections() or place == "nodes.setup":
                continue  # sections; and lines of Bash, which are meant to run
            holds = texts_of(hints[item.name])
            yield place, holds
            if holds == "pairs":
                yield place, "names"


KEYS = sorted(keys())

#: Keys whose value is text of some form; any other key refuses all of ``TEXTS`` by its type.
TEXT_KEYS = [key for key in KEYS if key[1] != "other"]


def put(config: dict[str, Any], place: str, holds: str, text: str) -> None:
    """Set one key of ``config`` to ``text``: as value, in a list, as value or name in a mapping."""
    *above, name = place.split(".")
    inside: Any = config
    for word in above:
        inside = inside["nodes"][0] if word == "nodes" else inside.setdefault(word, {})
    if place.startswith("data.store"):
        config["data"].pop("mode", None)
    value: Any = {"texts": [text], "pairs": {"comment": text}, "names": {text: "x"}}.get(holds, text)
    inside[name] = {**inside.get(name, {}), **value} if isinstance(value, dict) else value


class Sandbox:
    """A folder with stand-ins for all programs that scripts start; they record their arguments and variables."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.bin = folder / "bin"
        self.home.mkdir()
        self.bin.mkdir()
        python = f"""
[[ " $* " == *"import gnnfleet"* ]] && exit
env -0 >{folder}/env.$$; printf '%s\\0' "$0" "$@" >{folder}/new.$$
mv {folder}/new.$$ {folder}/argv.$$
[[ -z ${{GNNFLEET_SERVER_READY:-}} ]] || : >"$GNNFLEET_SERVER_READY\""""
        stubs = {
            "python3": python, "ssh": python, "scontrol": "echo gnn1; echo gnn2", "getent": "echo 10.0.0.1", "ip": "",
            "srun": 'while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=0 exec "$@"', "nproc": "echo 2",
        }  # fmt: skip
        for name, text in stubs.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.bin / name).chmod(0o755)
        self.env = {"HOME": str(self.home), "PATH": f"{self.bin}:/usr/bin:/bin", "SLURM_NNODES": "2"}
        self.env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "gnn[1-2]"}

    def load(self, config: Mapping[str, Any]) -> ResolvedConfig:
        text = yaml.safe_dump(dict(config), allow_unicode=False)
        (self.folder / "cluster.yml").write_text(text)
        return resolve_run(load_config(self.folder / "cluster.yml"))

    def run(self, *argv: str) -> list[tuple[list[str], dict[str, str]]]:
        """Run a command; return argv and environment of each stand-in that it started."""
        for late in self.folder.glob("argv.*"):  # of a stand-in that the end of an earlier script has killed
            late.unlink()
        done = subprocess.run(argv, cwd=self.folder, env=self.env, capture_output=True, timeout=60)
        unknown = b"command not found" in done.stderr and b"cannot be imported by" not in done.stderr  # another Python
        assert b"syntax error" not in done.stderr and not unknown, done.stderr
        found = []
        for path in self.folder.glob("argv.*"):
            variables = path.with_name(path.name.replace("argv", "env"))
            pairs = (one.partition("=") for one in variables.read_bytes().decode().split("\0"))
            found.append((path.read_bytes().decode().split("\0")[1:-1], {name: value for name, _, value in pairs}))
            path.unlink()
            variables.unlink()
        return found

    def check(self) -> None:
        assert not list(self.folder.rglob(CANARY)), "a value was executed"


def check_commands(sandbox: Sandbox, config: ResolvedConfig) -> None:
    """Run the commands of the plan, as they are written and as one line of a login shell."""
    for node in offline_plan(config, "run-1").nodes:
        folder = node.run_dir.replace("~", str(sandbox.home), 1) if node.run_dir.startswith("~/") else node.run_dir
        Path(folder).mkdir(parents=True, exist_ok=True)
        for command in filter(None, (node.start, node.server, node.trainer)):
            for words in (("bash", "-c", render(command)), ("sh", "-c", shell_line(command))):
                for argv, env in sandbox.run(*words):
                    assert argv == [at_home(word, sandbox) for word in command.argv[1:]]
                    assert not [
                        name
                        for name, value in config.nodes[node.node_rank].env.items()
                        if env[name] != at_home(value, sandbox)
                    ]
        argv = attach_argv(config, node)[2:]
        login = config.nodes[node.node_rank]
        assert argv[-2] == (f"{login.user}@{login.host}" if login.user else login.host)
        assert not argv[-2].startswith("-") and ssh_argv(login.user, login.port)


def at_home(word: str, sandbox: Sandbox) -> str:
    return f"{sandbox.home}/{word[2:]}" if word.startswith("~/") else word


def check_exports(sandbox: Sandbox, config: ResolvedConfig) -> None:
    own = ("python3", "own.py", *TEXTS[:6])
    (sandbox.folder / "own.py").touch()
    if config.data.mode == "verify":
        parts = Path(at_home(config.data.folder, sandbox))
        parts.mkdir(parents=True, exist_ok=True)
        (parts / "manifest.json").touch()
    for kind, words in (("bash", own), ("bash", ()), ("torchrun", ()), ("slurm", own)):
        request = ExportRequest(config, "run-1", words, sandbox.folder)
        output = sandbox.folder / f"{CANARY}; touch {CANARY}; $(touch {CANARY})" / "run.sh"
        try:
            script = export_script(kind, request, {}, output)
        except UsageError:
            continue
        path = sandbox.folder / "run.sh"
        path.write_text(script.text)
        if words and kind != "torchrun":  # the stand-in of a rank may be killed before it has recorded anything
            assert all(quote(word) in script.text for word in words[1:])
        given = (node.env for node in config.nodes[:1])
        for argv, env in sandbox.run("bash", str(path), *([] if kind == "slurm" else ["0"])):
            if "train" in argv or words and words[1] in argv:
                assert all(env[name] == value for names in given for name, value in names.items())
            if words and words[1] in argv and kind != "torchrun":
                assert argv == list(words[1:]), f"{kind}: {argv!r} of {path.read_text()}"
    try:
        made = export_kubernetes(ExportRequest(config, "run-1", own, sandbox.folder), Cluster(f"{TEXTS[0]}"))
    except UsageError:
        return
    documents = list(yaml.safe_load_all(made.text()))
    (data,) = [one["data"] for one in documents if one["kind"] == "ConfigMap"]
    trainer = json.loads(data["node0.json"])["spec"]["trainer"]
    assert trainer["argv"][-len(own) + 1 :] == list(own[1:])
    assert all(trainer["env"].get(name) == value for name, value in config.nodes[0].env.items())
    assert documents == list(made.manifests)


def check_sbatch(sandbox: Sandbox, config: ResolvedConfig) -> None:
    words = ("python3", *TEXTS[:6])
    log = sandbox.folder / TEXTS[0].replace("/", "")
    try:
        text = sbatch_script(config, run_id="run-1", command=words, cwd=sandbox.folder, log=log)
    except UsageError:
        return
    (sandbox.folder / "job.sh").write_text(text)
    assert [argv for argv, _ in sandbox.run("bash", "job.sh")] == [list(words[1:])]
    options = dict(sbatch_option(line) for line in text.split("\n") if line.startswith("#SBATCH"))
    assert options["job-name"] == config.name and options["output"] == str(log)
    assert all(options[name] == value for name, value in config.slurm.items() if name == "comment")


def sbatch_option(line: str) -> tuple[str, str]:
    """Return name and value of the one option in a line, read as ``_get_argument`` of sbatch reads it."""
    words, word, quote, text = [], "", "", line.removeprefix("#SBATCH ")
    characters = iter(text)
    for one in characters:
        if one == "\\":
            word += next(characters)
        elif one == quote:
            quote = ""
        elif not quote and one in "'\"":
            quote = one
        elif not quote and one == "#":
            break
        elif not quote and one.isspace():
            words.append(word)
            word = ""
        else:
            word += one
    assert not words and not quote, line
    name, _, value = word.removeprefix("--").partition("=")
    return name, value


def check_all(sandbox: Sandbox, config: Mapping[str, Any], *, strict: bool = False) -> None:
    """Load ``config``; if it is accepted, run all that is made of it. A refusal names file and line.

    ``strict``: nothing of it may be refused later, as a dataset that does not exist is.
    """
    try:
        loaded = sandbox.load(config)
    except ConfigError as error:
        assert all(problem.line and problem.file.endswith("cluster.yml") for problem in error.problems), str(error)
        assert "\n" not in "".join(problem.message for problem in error.problems)
        return
    for check in (check_commands, check_exports, check_sbatch):
        try:
            check(sandbox, loaded)
        except FleetError:
            assert not strict
        sandbox.check()


def prefixes(sandbox: Sandbox) -> tuple[str, ...]:
    """What some keys want before any text: a path, a URL."""
    return "", "a", "~/", f"{sandbox.folder}/", "s3://b/", "GPU-"


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return Sandbox(tmp_path)


LATER = (
    "data.serving",
    "data.dataset",
    "data.source",
    "data.options",
    "train.resume",
    "train.start.checkpoint",
    "run.files",
    "slurm_job",
)  #: refused by what they name

QUICK = (0,)  #: of ``TEXTS``, in the fast tests


@pytest.mark.quiet
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=str(k), marks=[] if k in QUICK else pytest.mark.slow) for k, text in enumerate(TEXTS)],
)
def test_hostile_texts_in_all_keys_at_once(text: str, sandbox: Sandbox) -> None:
    """Of each key the first form that is accepted; then all that is made of this config is run."""
    config, kept = yaml.safe_load(BASE), 0
    for place, holds in KEYS:
        for before in prefixes(sandbox) if (place, holds) in TEXT_KEYS and place not in LATER else ():
            tried = json.loads(json.dumps(config))
            put(tried, place, holds, before + text)
            try:
                sandbox.load(tried)
            except ConfigError as error:
                assert all(problem.line for problem in error.problems), f"{place}: {error}"
                continue
            except UsageError:
                continue
            config, kept = tried, kept + 1
            break
    assert kept > 10 or "\x00" in text or "\n" in text or "\r" in text or "\u2028" in text
    check_all(sandbox, config, strict=True)


@pytest.mark.slow
@pytest.mark.quiet
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), data=st.data())
def test_hostile_texts_in_one_key(key: tuple[str, str], data: st.DataObject, sandbox: Sandbox) -> None:
    words = data.draw(
        st.lists(st.sampled_from((*TEXTS, "'", '"', "\\", " ", "-", "a", "$HOME", "\n", "~")), max_size=4)
    )
    config = yaml.safe_load(BASE)
    put(config, *key, data.draw(st.sampled_from(prefixes(sandbox))) + "".join(words))
    check_all(sandbox, config)


def test_a_command_refuses_a_variable_that_is_shell_code() -> None:
    with pytest.raises(ValueError, match="not the name of a variable"):
        render(Command(("true",), {"A=1; touch PWNED; B": Secret("x")}))


def test_options_of_sbatch_on_the_command_line_stay_on_their_lines(sandbox: Sandbox) -> None:
    config = sandbox.load(yaml.safe_load(BASE))
    request = ExportRequest(config, "run-1", (), sandbox.folder)
    with pytest.raises(UsageError, match="slurm: `comment`: its value has several lines"):
        export_script("slurm", request, parse_options(f"comment=x\ntouch {CANARY}"), Path("x"))


def test_sandbox_notices_an_executed_value(sandbox: Sandbox) -> None:
    for code in ("touch PWNED", "bash -c 'touch PWNED'"):
        sandbox.run("bash", "-c", code)
        with pytest.raises(AssertionError, match="executed"):
            sandbox.check()
        os.unlink(sandbox.folder / CANARY)


@pytest.mark.parametrize("kind", ["bash", "slurm"])
def test_lines_of_an_argument_are_not_indented_in_scripts(sandbox: Sandbox, kind: str) -> None:
    (sandbox.folder / "own.py").touch()
    words = ("python3", "own.py", "x\ny\n", " \\\n")
    request = ExportRequest(sandbox.load(yaml.safe_load(BASE)), "run-1", words, sandbox.folder)
    text = export_script(kind, request, {}, sandbox.folder / "run.sh").text
    assert all(quote(word) in text for word in words[1:])
