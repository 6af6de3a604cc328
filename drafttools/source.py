"""vLLM's source as a tree of parsed functions, read without importing it.

The same reading serves `drafttools doctor` on a foreign tree and the shim in a running engine, so the two cannot
disagree. Judgements rest on what the source contains, never on a version string.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """One function or method as written."""

    node: FunctionNode

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names in order, positional first, then keyword-only."""
        a = self.node.args
        return tuple(arg.arg for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs])

    @property
    def required(self) -> frozenset[str]:
        """Names without a default."""
        a = self.node.args
        positional = [arg.arg for arg in [*a.posonlyargs, *a.args]]
        needed = positional[: len(positional) - len(a.defaults)]
        keyword = [arg.arg for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
        return frozenset([*needed, *keyword])

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name, attribute and string in the body: what the function can be seen to use."""
        found: set[str] = set()
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
        return frozenset(found)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the function without comments, docstring, annotations of its own line, or layout.

        Taken from the syntax tree, since `ast.unparse` and `ast.dump` write it differently from one Python to the next.
        """
        body = self.node.body
        if ast.get_docstring(self.node, clean=False) is not None:
            body = body[1:]
        return hashlib.sha256((repr(self.parameters) + _canonical(body)).encode()).hexdigest()[:12]


def _canonical(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, ast.AST):
        fields = [_canonical(field) for _, field in ast.iter_fields(value) if field not in (None, [])]
        return f"{type(value).__name__}({','.join(fields)})"
    return repr(value)


class Tree:
    """A vLLM package directory (the one that holds `__init__.py`)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, ast.Module | None] = {}

    def path(self, module: str) -> Path | None:
        """The file of `vllm.a.b`, or None when the tree has no such module."""
        stem = self.root.joinpath(*module.split(".")[1:])
        for candidate in (stem / "__init__.py", stem.with_suffix(".py")):
            if candidate.is_file():
                return candidate
        return None

    def module(self, module: str) -> ast.Module | None:
        """The parsed module, or None when it is missing or is not Python."""
        if module not in self._modules:
            path = self.path(module)
            try:
                self._modules[module] = ast.parse(path.read_bytes()) if path else None
            except (SyntaxError, ValueError):
                self._modules[module] = None
        return self._modules[module]

    def function(self, module: str, qualname: str) -> Function | None:
        """`Class.method` or `function` of a module, as written in that module; None when it is not there."""
        parsed = self.module(module)
        node: ast.AST | None = parsed
        for name in qualname.split("."):
            node = _child(node, name)
        return Function(node) if isinstance(node, FunctionNode) else None

    def has_class(self, module: str, name: str) -> bool:
        """Whether the module defines the class."""
        return isinstance(_child(self.module(module), name), ast.ClassDef)

    def mention(self, place: str, text: str) -> str | None:
        """The first file of module or package `place` whose text contains `text`; None when there is none."""
        stem = self.root.joinpath(*place.split(".")[1:])
        files = sorted(stem.rglob("*.py")) if stem.is_dir() else [stem.with_suffix(".py")]
        sought = text.encode()
        for file in files:
            if file.is_file() and sought in file.read_bytes():
                return str(file.relative_to(self.root))
        return None

    def defines(self, module: str, name: str) -> bool:
        """Whether the module defines, imports or assigns `name` at its top level."""
        parsed = self.module(module)
        return parsed is not None and name in _bound_names(parsed.body)


def _child(node: ast.AST | None, name: str) -> ast.AST | None:
    """The last definition of `name` directly in `node`, also under `if` and `try`."""
    found = None
    for child in _statements(getattr(node, "body", [])):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and child.name == name:
            found = child
    return found


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body, those under `if` and `try` included."""
    flat: list[ast.stmt] = []
    for statement in body:
        flat.append(statement)
        if isinstance(statement, (ast.If, ast.Try)):
            flat += _statements(statement.body) + _statements(statement.orelse)
    return flat


def _bound_names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for statement in _statements(body):
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names
