"""`drafttools explain`: what a patch does, why, and when it can go."""

from __future__ import annotations

from typing import Annotated

import typer

from drafttools import patches
from drafttools.errors import DraftToolsError
from drafttools.patches import document


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(explain)


def explain(
    name: Annotated[str | None, typer.Argument(metavar="[PATCH]", help="A patch; without it, all are listed.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/patches.md.")] = False,
) -> None:
    """Print the record of a patch, or the list of patches. Exits 2 for a name that no patch has."""
    if as_markdown:
        print(document.markdown(), end="")
    elif name is None:
        _table([(patch.name, patch.what) for patch in patches.ALL])
    else:
        by_name = {patch.name: patch for patch in patches.ALL}
        if name not in by_name:
            raise DraftToolsError(f"there is no patch {name!r}; known: {', '.join(by_name)}")
        print(name)
        _table(document.fields(by_name[name]))


def _table(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for label, text in rows:
        table.add_row(Text(label, style="bold"), Text(text))
    console.print(table)
