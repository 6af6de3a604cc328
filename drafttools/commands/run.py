"""`drafttools run`: start a command with drafttools active in it and in every process it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from drafttools.bootstrap import launcher


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(context_settings={"ignore_unknown_options": True})(run)


def run(
    command: Annotated[list[str], typer.Argument(help="The command, after `--`.")],
    mode: Annotated[str, typer.Option(help="enforce, observe or off.")] = "enforce",
    report: Annotated[Path | None, typer.Option(help="Directory for one JSON report per process.")] = None,
) -> None:
    """Run COMMAND with draft models kept at their own precision, e.g. `drafttools run -- vllm serve ...`."""
    for sentence in launcher.warnings(command, dict(os.environ)):
        print(f"drafttools: {sentence}", file=sys.stderr)
    launcher.run(command, mode, report)
