"""The `drafttools` command: each subcommand lives in its own module under `drafttools.commands`."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer

from drafttools import commands
from drafttools.errors import DraftToolsError

app = typer.Typer(
    name="drafttools",
    help="Keep vLLM draft models at the precision they shipped with, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; a DraftToolsError prints as one line and exits 2."""
    for info in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"{commands.__name__}.{info.name}").register(app)
    try:
        app()
    except DraftToolsError as error:
        print(f"drafttools: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
