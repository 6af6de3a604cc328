"""`drafttools inject`: how to activate drafttools by environment alone, in a container or a pod."""

from __future__ import annotations

from typing import Annotated

import typer

from drafttools import settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inject)


def inject(
    dockerfile: Annotated[bool, typer.Option("--dockerfile", help="Print a Dockerfile line instead.")] = False,
) -> None:
    """Print the PYTHONPATH entry whose sitecustomize activates drafttools in every Python process."""
    directory = settings.inject_dir()
    print(f"ENV PYTHONPATH={directory}" if dockerfile else directory)
