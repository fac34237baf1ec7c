"""Finds every message that our packages can show a user, by reading the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BASES = {"FleetError", "TrainerError", "RangeError", "_Wrong", "LeaseError"}
OTHERS = {
    "UsageError",
    "BadParameter",
    "ClickException",
    "LookupError",
    "ImportError",
}  # click's errors, and errors that our packages convert to their own
SHOWN = {
    "Problem",
    "report",
    "make_cause",
    "own_cause",
    "failed",
    "_finding",
    "_error",
}  # calls that report problems of a config or the end of a run
FINDINGS = {"finding": 1, "Finding": 2}  # calls that make a preflight finding, with the position of the severity
REMEDIES = {"remedy", "command", "host", "by_hand"}  # names of arguments that contain no message
WORDING = (
    "transport/errors.py",
    "transport/auth.py",
    "node/peers/hub.py",
    "node/peers/member.py",
)  # modules with functions that return (…, text, remedy)
BLANK = "…"  # stands for a value
DEPTH = 3  # how many names and helpers are followed to find a text
LEAST_WORDS = 2  # fewer words are no message; a text of exactly so many must contain a value
LEAST_INSIDE = 4  # words of a helper's text inside a message; fewer are a name or a number


@dataclass(frozen=True)
class Message:
    """A message in the source, with … for each value that is inserted at run time."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@cache
def messages() -> list[Message]:
    modules = _modules()
    names = _errors(modules) | OTHERS | SHOWN
    found = {message for module in modules for message in module.messages(names)}
    return sorted(found, key=lambda message: (message.file, message.line, message.text))


@cache
def spoken_texts() -> tuple[str, ...]:
    """Return all string constants of our packages that contain a space, normalised by ``fixed``."""
    nodes = (node for module in _modules() for node in module.nodes())
    kinds = (ast.Constant, ast.JoinedStr)
    found = {text for each in nodes if isinstance(each, kinds) for text in _texts(each)}
    return tuple(fixed(text) for text in found if " " in text)


@cache
def fixed(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


def _modules() -> list[_Module]:
    packages = ("gnnfleet", "launcher", "trainer")
    return [_Module(path) for package in packages for path in sorted((REPOSITORY / package).rglob("*.py"))]


def _errors(modules: list[_Module]) -> set[str]:
    """Return the names of ``BASES`` and of all classes derived from them."""
    derived = set(BASES)
    parents = {name: bases for module in modules for name, bases in module.parents()}
    while more := {name for name, bases in parents.items() if bases & derived} - derived:
        derived |= more
    return derived


@dataclass(frozen=True)
class _Module:
    path: Path

    @property
    def file(self) -> str:
        return str(self.path.relative_to(REPOSITORY))

    def tree(self) -> ast.Module:
        return _parsed(self.path)

    def nodes(self) -> tuple[ast.AST, ...]:
        return _nodes(self.path)

    def functions(self) -> tuple[ast.FunctionDef, ...]:
        return _functions(self.path)

    def parents(self) -> Iterator[tuple[str, set[str]]]:
        for each in self.nodes():
            if isinstance(each, ast.ClassDef):
                yield each.name, {ast.unparse(base).split(".")[-1] for base in each.bases}

    def messages(self, names: set[str]) -> Iterator[Message]:
        for spoken in self._spoken(names | self._forwarding(names)):
            for line, text in self._words(spoken, self._enclosing(spoken), DEPTH):
                if " " in text and _words(text) >= LEAST_WORDS and _words(text) + text.count(BLANK) > LEAST_WORDS:
                    yield Message(self.file, line, text)

    def _spoken(self, names: set[str]) -> Iterator[ast.expr]:
        for each in self.nodes():
            if isinstance(each, ast.Call):
                yield from _spoken(each, names)
            elif isinstance(each, ast.Return) and isinstance(each.value, ast.Tuple) and self.file.endswith(WORDING):
                yield from each.value.elts[:-1]

    def _forwarding(self, names: set[str]) -> set[str]:
        """Return the names of functions that use one of their arguments as the text of an error."""
        errors = names - SHOWN
        return {
            function.name
            for call in self.nodes()
            if isinstance(call, ast.Call) and _name(call.func) in errors
            for used in (name for argument in _spoken(call, names) for name in ast.walk(argument))
            if isinstance(used, ast.Name)
            for function in self.functions()
            if _contains(function, call) and used.id in {each.arg for each in function.args.args}
        }

    def _enclosing(self, expression: ast.expr) -> ast.AST:
        around: ast.AST = self.tree()
        for each in self.functions():
            if _contains(each, expression):
                around = each
        return around

    def _words(self, value: ast.expr, inside: ast.AST, depth: int) -> Iterator[tuple[int, str]]:
        """Yield the possible texts of an expression, with line numbers.

        inside: the function or module in which names of ``value`` are looked up. depth: how many levels of names and
        function calls are followed.
        """
        if isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp):
            for text in _texts(value):
                yield value.lineno, text
            if isinstance(value, ast.JoinedStr) and depth:
                for part in value.values:
                    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Call):
                        inner = self._words(part.value, inside, depth - 1)
                        yield from ((line, text) for line, text in inner if _words(text) >= LEAST_INSIDE)
        elif isinstance(value, ast.IfExp):
            yield from self._words(value.body, inside, depth)
            yield from self._words(value.orelse, inside, depth)
        elif isinstance(value, ast.BoolOp):
            for each in value.values:
                yield from self._words(each, inside, depth)
        elif isinstance(value, ast.Name) and depth:
            for assigned in _assigned(inside, value.id):
                yield from self._words(assigned, inside, depth - 1)
        elif isinstance(value, ast.Call) and depth:
            if isinstance(value.func, ast.Attribute) and value.func.attr in ("join", "replace", "format", "strip"):
                for each in value.args:
                    yield from self._words(each, inside, depth - 1)
            for function in self._functions(_name(value.func)):
                for each in ast.walk(function):
                    if isinstance(each, ast.Return) and each.value is not None:
                        yield from self._words(each.value, function, depth - 1)
        elif isinstance(value, ast.List | ast.Tuple):
            for each in value.elts:
                yield from self._words(each, inside, depth)
        elif isinstance(value, ast.ListComp | ast.GeneratorExp):
            yield from self._words(value.elt, inside, depth)

    def _functions(self, name: str) -> list[ast.FunctionDef]:
        return [each for each in self.functions() if each.name == name]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_parsed(path)))


@cache
def _functions(path: Path) -> tuple[ast.FunctionDef, ...]:
    return tuple(each for each in _nodes(path) if isinstance(each, ast.FunctionDef))


def _contains(function: ast.FunctionDef, expression: ast.expr) -> bool:
    return function.lineno <= expression.lineno <= (function.end_lineno or 0)


def _words(text: str) -> int:
    return len(re.findall(r"[A-Za-z]{2,}", text))


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _spoken(call: ast.Call, names: set[str]) -> list[ast.expr]:
    name = _name(call.func)
    if name in FINDINGS:
        place = FINDINGS[name]
        ok = len(call.args) > place and isinstance(call.args[place], ast.Constant) and call.args[place].value == "ok"
        return [] if ok else call.args[place + 2 : place + 3] if len(call.args) > place + 2 else call.args[1:]
    if name not in names:
        return []
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg not in REMEDIES)]
    return [each for each in given if not (isinstance(each, ast.Name) and each.id in REMEDIES)]


def _assigned(inside: ast.AST, name: str) -> Iterator[ast.expr]:
    for each in ast.walk(inside):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield each.value
                elif isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple):
                    pairs = zip(target.elts, each.value.elts, strict=True)
                    yield from (value for to, value in pairs if isinstance(to, ast.Name) and to.id == name)
        elif isinstance(each, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
            if isinstance(each.target, ast.Name) and each.target.id == name and each.value is not None:
                yield each.value


def _texts(value: ast.expr) -> list[str]:
    """Return the possible texts of an expression, with … for unknown values."""
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else []
    if isinstance(value, ast.BinOp):
        left, right = _texts(value.left) or [BLANK], _texts(value.right) or [BLANK]
        return [a + b for a in left for b in right]
    if isinstance(value, ast.IfExp):
        return _texts(value.body) + _texts(value.orelse)
    if isinstance(value, ast.JoinedStr):
        return ["".join(each.value if isinstance(each, ast.Constant) else BLANK for each in value.values)]
    return [BLANK]
