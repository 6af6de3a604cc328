"""`drafttools status`: is it in effect, in every worker?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from drafttools import settings
from drafttools.errors import DraftToolsError
from drafttools.status import Status, merge


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)


def status(
    directory: Annotated[Path | None, typer.Argument(help="The --report directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Exit 0 only if every worker that built a draft is in effect, 1 if not, 2 if the reports cannot be read."""
    if directory is None:
        if settings.REPORT_DIR not in os.environ:
            raise DraftToolsError(f"no report directory: pass it, or set {settings.REPORT_DIR}")
        directory = Path(os.environ[settings.REPORT_DIR])
    merged = merge(directory)
    if as_json:
        print(json.dumps(merged.as_json(), indent=1))
    else:
        _print(merged)
    raise typer.Exit(0 if merged.in_effect else 1)


def _print(merged: Status) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    processes = Table("role", "rank", "pid", "way in", "mode", "draft", "parameters", "calls", "captures")
    for report in sorted(merged.reports, key=lambda r: (r["role"], r["rank"] or 0, r["pid"])):
        for draft in report["drafts"] or [None]:
            processes.add_row(*_process_row(report, draft))
    console.print(processes)
    _print_table(console, ("patch", "state in the workers", "reason"), _patch_rows(merged))
    _print_table(console, ("gate", "asked", "declined"), _gate_rows(merged))
    for report in merged.reports:
        for sentence in [*report["ungated"], *report["notes"]]:
            console.print(f"[yellow]pid {report['pid']}: {sentence}", highlight=False, soft_wrap=True)
    for problem in merged.problems:
        console.print(f"[red]{problem}", highlight=False, soft_wrap=True)
    console.print("[green]in effect" if merged.in_effect else "[red]not in effect")


def _print_table(console: Any, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _process_row(report: dict[str, Any], draft: dict[str, Any] | None) -> list[str]:
    rank = "" if report["rank"] is None else f"{report['rank']}/{report['world_size']}"
    way_in = f"{report['way_in']} ({report['hook']})"
    row = [report["role"], rank, str(report["pid"]), way_in, report["mode"]]
    if draft is None:
        return [*row, "", "", "", ""]
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in draft["dtypes"].items())
    captures = ", ".join(f"{count} {kind}" for kind, count in draft["captures"].items() if count)
    return [*row, draft["class"], dtypes, str(sum(draft["calls"].values())), captures]


def _patch_rows(merged: Status) -> list[list[str]]:
    workers = [r for r in merged.reports if r["role"] == "worker"]
    states: dict[str, dict[str, int]] = {}
    reasons: dict[str, str] = {}
    for report in workers:
        for patch in report["patches"]:
            counts = states.setdefault(patch["name"], {})
            counts[patch["state"]] = counts.get(patch["state"], 0) + 1
            reasons[patch["name"]] = patch["reason"] or reasons.get(patch["name"], "")
    return [
        [name, ", ".join(f"{state} x{n}" if n > 1 else state for state, n in counts.items()), reasons[name]]
        for name, counts in states.items()
    ]


def _gate_rows(merged: Status) -> list[list[str]]:
    totals: dict[str, list[int]] = {}
    for report in merged.reports:
        for name, gate in report["gates"].items():
            total = totals.setdefault(name, [0, 0])
            total[0] += gate["asked"]
            total[1] += gate["declined"]
    return [[name, str(asked), str(declined)] for name, (asked, declined) in totals.items()]
