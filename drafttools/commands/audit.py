"""`drafttools audit`: what the draft holds, what stock vLLM would do with it, and what drafttools will do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from drafttools.audit import Audit

Checkpoint = Annotated[str, typer.Argument(help="Checkpoint directory or hub id.", show_default=False)]
Draft = Annotated[str | None, typer.Option(help="The draft's own checkpoint, for a draft that is not in CHECKPOINT.")]
Method = Annotated[str | None, typer.Option(help="Speculative method that will be asked for: mtp, dspark, eagle3...")]
TargetConfig = Annotated[str | None, typer.Option(help="The target's directory, when CHECKPOINT is a draft alone.")]
Ask = Annotated[list[str] | None, typer.Option(help="Runtime prefix to answer for; may be repeated.")]
Report = Annotated[Path | None, typer.Option(help="Directory of a running engine's drafttools-*.json reports.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(audit)


def audit(
    checkpoint: Checkpoint,
    draft: Draft = None,
    method: Method = None,
    target_config: TargetConfig = None,
    ask: Ask = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Tell how a checkpoint's draft is stored, what stock vLLM would load it as, and what drafttools will do.

    Reads headers only. Exits 0 for ok and fixed, 1 for absent, incomplete, conflict and broken files, 2 for usage.
    """
    if draft is not None and target_config is not None:
        raise typer.BadParameter("give --draft or --target-config, not both", param_hint="--target-config")
    from rich.console import Console
    from rich.progress import Progress

    from drafttools import audit as auditing
    from drafttools.formats import HeaderError

    errors = Console(stderr=True)
    try:
        with Progress(console=errors, transient=True, disable=as_json or not errors.is_terminal) as bar:
            task = bar.add_task("headers", total=None)
            result = auditing.audit(
                checkpoint,
                draft=draft,
                method=method,
                target_config=target_config,
                asked=ask or (),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except HeaderError as error:
        print(f"drafttools: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if report is not None:
        _compare(result, report, checkpoint, draft, target_config)
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        _print(result.as_json())
    raise typer.Exit(0 if result.verdict in ("ok", "fixed") else 1)


def _compare(result: Audit, report: Path, checkpoint: str, draft: str | None, target_config: str | None) -> None:
    from drafttools import attest
    from drafttools.audit import compare_reports, open_for_audit

    found = compare_reports(open_for_audit(checkpoint, draft, target_config), attest.read(report))
    result.problems += found
    result.conflict = result.conflict or bool(found)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    kind, layers = result["draft"]["kind"], ", ".join(map(str, result["draft"]["layers"]))
    table = Table(title=escape(f"{result['checkpoint']}: draft {kind}" + (f", layers {layers}" if layers else "")))
    for column in ("prefix", "layer", "stored", "stock", "drafttools"):
        table.add_column(column, overflow="fold")
    for row in result["modules"]:
        stored = row["stored"] + (f" {row['dtype']}" if row["stored"] == "unquantized" else "")
        style = None if row["draft"] else "dim"
        stock = row["stock"] or "?"
        table.add_row(
            escape(row["prefix"]),
            "" if row["layer_index"] is None else str(row["layer_index"]),
            stored,
            f"[red]{stock}[/red]" if row["agree"] is False else stock,
            row["answer"] or "?",
            style=style,
        )
    console.print(table)
    console.print(f"stock: vLLM {result['vllm']}" if result["vllm"] else "stock: no vLLM is importable here")
    for title in ("missing", "problems"):
        for sentence in result[title]:
            console.print(f"{title.removesuffix('s')}: {sentence}", markup=False, soft_wrap=True)
    console.print(f"verdict: [bold]{result['verdict']}[/bold]")
