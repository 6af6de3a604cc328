"""`drafttools doctor`: what would each patch do here, and what would keep drafttools out?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drafttools import doctor as diagnosis
from drafttools.patching import Patch, Verdict

_COLOURS = {"applies": "green", "not_needed": "dim", "refused": "red"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    vllm_path: Annotated[Path | None, typer.Option(help="A vLLM tree to judge instead of the installed one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell per patch whether it applies, is not needed or is refused, without importing or starting vLLM.

    Exits 0 if no patch is refused, 1 if one is, 2 for a path that is no vLLM tree.
    """
    tree = diagnosis.tree_at(vllm_path if vllm_path is not None else diagnosis.installed())
    verdicts = diagnosis.verdicts(tree)
    obstacles = diagnosis.obstacles()
    if as_json:
        print(json.dumps(_as_json(str(tree.root), diagnosis.version(tree), verdicts, obstacles), indent=1))
    else:
        print(f"{tree.root} (vLLM {diagnosis.version(tree) or 'of unknown version'})")
        _print(verdicts, obstacles)
    raise typer.Exit(1 if any(verdict.state == "refused" for _, verdict in verdicts) else 0)


def _as_json(
    root: str, version: str | None, verdicts: list[tuple[Patch, Verdict]], obstacles: list[str]
) -> dict[str, Any]:
    return {
        "vllm": root,
        "version": version,
        "patches": [
            {"name": patch.name, "state": verdict.state, "reason": verdict.reason, "opt_in": patch.opt_in}
            for patch, verdict in verdicts
        ],
        "obstacles": obstacles,
    }


def _print(verdicts: list[tuple[Patch, Verdict]], obstacles: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table("patch", "verdict", "why")
    for patch, verdict in verdicts:
        state = Text(verdict.state.replace("_", " "), style=_COLOURS[verdict.state])
        table.add_row(patch.name, state, Text(verdict.reason))
    console.print(table)
    for sentence in obstacles:
        console.print(Text(sentence, style="yellow"), soft_wrap=True)
    if not obstacles:
        console.print("Nothing here keeps drafttools out of a process.")
