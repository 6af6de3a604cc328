"""Start a command with the environment that activates drafttools in it and in every Python process it starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from drafttools import settings
from drafttools.errors import DraftToolsError


def environment(mode: str, report: Path | None, base: dict[str, str]) -> dict[str, str]:
    """`base` plus what `drafttools run` sets. Raises DraftToolsError for a report directory that cannot be written."""
    environ = {k: v for k, v in base.items() if k not in (settings.MODE, settings.WAY_IN, settings.RUN_ID)}
    settings.mode({settings.MODE: mode})
    settings.prepare_children(environ, mode=mode, way_in="run")
    if report is not None:
        environ[settings.REPORT_DIR] = str(_writable(report))
    return environ


def warnings(command: list[str], environ: dict[str, str]) -> list[str]:
    """What would keep drafttools out of the command or of its children, one sentence each."""
    found = []
    if "python" in os.path.basename(command[0]) and _interpreter_flags(command) & set("ISE"):
        found.append("python -I, -S and -E skip sitecustomize; only the vLLM plugin can activate drafttools then")
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and "drafttools" not in plugins.split(","):
        found.append(f"VLLM_PLUGINS={plugins!r} leaves the drafttools plugin out; only sitecustomize activates it")
    return found


def _interpreter_flags(command: list[str]) -> set[str]:
    """The one-letter options that Python itself gets: those before the script, module or code."""
    flags: set[str] = set()
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word.startswith("--"):
            break
        flags |= set(word[1:])
        if word in ("-X", "-W"):
            next(words, None)
        elif set(word) & set("cmXW"):  # the rest of the word, or the next one, is its argument
            break
    return flags


def run(command: list[str], mode: str, report: Path | None) -> None:
    """Replace this process by `command`. Raises DraftToolsError when it cannot be started."""
    if shutil.which(command[0]) is None:
        raise DraftToolsError(f"{command[0]}: command not found; give the command after --")
    os.execvpe(command[0], command, environment(mode, report, dict(os.environ)))


def _writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".drafttools-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DraftToolsError(f"cannot write to the report directory {directory}: {error}; choose another") from None
    return directory.resolve()
