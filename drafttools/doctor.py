"""What drafttools would do on a vLLM source tree, and what would keep it out of the processes of this environment.

The target tree is parsed, never imported.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from drafttools import activation, patches, settings
from drafttools.bootstrap import launcher
from drafttools.errors import DraftToolsError
from drafttools.patching import Patch, Verdict, check
from drafttools.source import Tree

OLDEST_WRAPT = (1, 17)


def installed() -> Path:
    """The vLLM package directory that this interpreter would import.

    Raises DraftToolsError when there is none.
    """
    for finder in sys.meta_path:
        if type(finder).__module__ == activation.__name__:
            continue  # ours would take the look-up for an import
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec("vllm", None) if find_spec is not None else None
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    raise DraftToolsError(f"vLLM is not installed for {sys.executable}; pass --vllm-path DIR")


def tree_at(directory: Path) -> Tree:
    """The vLLM package at `directory`, or in it.

    Raises DraftToolsError when there is none.
    """
    for root in (directory, directory / "vllm"):
        if (root / "__init__.py").is_file() and (root / "envs.py").is_file():
            return Tree(root)
    raise DraftToolsError(f"{directory} holds no vLLM package; pass the directory with vLLM's __init__.py and envs.py")


def version(tree: Tree) -> str | None:
    """The version a tree gives itself, for the reader only: nothing is judged by it."""
    parsed = tree.module("vllm._version")
    for statement in parsed.body if parsed is not None else []:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            if "__version__" in names:
                return str(statement.value.value)
    return None


def verdicts(tree: Tree) -> list[tuple[Patch, Verdict]]:
    """What each patch would do on the tree."""
    return [(patch, check(patch, tree)) for patch in patches.ALL]


def obstacles(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What would keep drafttools, or a part of it, out of this environment's processes; one sentence each."""
    command = shutil.which("vllm", path=environ.get("PATH"))
    found = [*_plugin(), *_wrapt(), *_sitecustomize(sys.path), *_other_vllm(sys.path), *_other_interpreter(command)]
    found += launcher.warnings(_shebang(command) or [sys.executable], dict(environ))
    return [*found, *_expert_kernel()]


def _plugin() -> list[str]:
    if any(entry.name == "drafttools" for entry in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return []
    return [
        f"the vllm.general_plugins entry point is not installed for {sys.executable} (pip install drafttools): "
        "only `import drafttools`, `drafttools run` and `drafttools inject` reach a process"
    ]


def _wrapt() -> list[str]:
    try:
        found = importlib.metadata.version("wrapt")
    except importlib.metadata.PackageNotFoundError:
        return ["wrapt is not installed: no patch can be applied (pip install wrapt)"]
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < OLDEST_WRAPT:
        return [f"wrapt {found} is too old: drafttools needs {'.'.join(map(str, OLDEST_WRAPT))} (pip install -U wrapt)"]
    return []


def _sitecustomize(path: list[str]) -> list[str]:
    """A sitecustomize before ours hides it; ours runs the next one, the other need not."""
    ours = settings.inject_dir()
    if ours not in path:
        return []
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.origin is None or os.path.dirname(os.path.abspath(spec.origin)) == ours:
        return []
    return [f"{spec.origin} comes before drafttools' own sitecustomize and hides it: put {ours} first in PYTHONPATH"]


def _other_vllm(path: list[str]) -> list[str]:
    found = list(dict.fromkeys(filter(None, map(_vllm_in, path))))
    sentences = [f"{found[0]} hides {other}: both are on sys.path, the first is imported" for other in found[1:]]
    here = _vllm_in(os.getcwd())
    if here is not None and here not in found:
        sentences.append(f"{here} is what `python -m` and `python -c` would import in this directory")
    return sentences


def _vllm_in(directory: str) -> str | None:
    package = os.path.join(os.path.realpath(directory or os.curdir), "vllm")
    return package if os.path.isfile(os.path.join(package, "__init__.py")) else None


def _other_interpreter(command: str | None) -> list[str]:
    """`vllm` on PATH may belong to another environment, with its own packages."""
    words = _shebang(command)
    if not words or os.path.dirname(words[0]) == os.path.dirname(sys.executable) or "python" not in words[0]:
        return []
    return [f"the command {command} runs {words[0]}, not {sys.executable}: install drafttools there, too"]


def _shebang(script: str | None) -> list[str]:
    if script is None:
        return []
    try:
        with open(script, "rb") as file:
            first = file.readline(4096)
    except OSError:
        return []
    return first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []


def _expert_kernel() -> list[str]:
    from drafttools.experts import extension

    reason = extension.unavailable()
    return [f"{reason} (only mtp_expert_quantization on a GPU needs it)"] if reason else []
