"""`drafttools acceptance`: acceptance length from logs, metrics and results, and `compare` for two arms of sweeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from drafttools.errors import DraftToolsError

if TYPE_CHECKING:
    from drafttools.acceptance.evidence import Evidence
    from drafttools.acceptance.records import Rules, Run

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
K = Annotated[int | None, typer.Option("--k", min=1, help="Draft tokens a step, where the source does not tell.")]
SkipFirst = Annotated[int, typer.Option(min=0, help="Leave out this many intervals at the start of each source.")]
ExcludeAbove = Annotated[float | None, typer.Option(help="Leave out intervals with a larger acceptance length.")]
Interval = Annotated[float, typer.Option(min=0, help="Seconds between the two scrapes of a URL; 0: since its start.")]
Html = Annotated[Path | None, typer.Option(help="Write the report here.")]
Png = Annotated[Path | None, typer.Option(help="Write the figure here.")]
Report = Annotated[Path | None, typer.Option(help="Directory of the engine's drafttools-*.json reports.")]
Audit = Annotated[Path | None, typer.Option(help="Output of `drafttools audit CHECKPOINT --json`.")]


class _DefaultRead(TyperGroup):
    """A group whose subcommand may be left out: `acceptance FILE` is `acceptance read FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["read", *args]
        return super().parse_args(ctx, args)


class _ListOptions(TyperCommand):
    """A command whose --baseline and --candidate take all the words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        current = ""
        for word in args:
            if word.startswith("-"):
                current = word if word in ("--baseline", "--candidate") else ""
                spread += [] if current else [word]
            else:
                spread += [current, word] if current else [word]
        return super().parse_args(ctx, spread)


def register(app: typer.Typer) -> None:
    """Add `acceptance` with its two subcommands."""
    group = typer.Typer(cls=_DefaultRead, no_args_is_help=True, help="Acceptance length, measured and compared.")
    group.command("read", help="Acceptance length of files or URLs (the default).")(read)
    group.command("compare", cls=_ListOptions, help="Did the acceptance length change?")(compare)
    app.add_typer(group, name="acceptance")


def read(
    sources: Annotated[list[str] | None, typer.Argument(help="Logs, scrapes, results, or a server's URL.")] = None,
    before: Annotated[Path | None, typer.Option(help="Saved /metrics from before; goes with --after.")] = None,
    after: Annotated[Path | None, typer.Option(help="Saved /metrics from after.")] = None,
    k: K = None,
    skip_first: SkipFirst = 0,
    exclude_above: ExcludeAbove = None,
    interval: Interval = 0.0,
    as_json: Json = False,
    html: Html = None,
    png: Png = None,
    report: Report = None,
    audit: Audit = None,
) -> None:
    """Print the acceptance length of each source."""
    from drafttools.acceptance.evidence import load_evidence
    from drafttools.acceptance.records import Rules
    from drafttools.acceptance.sources import read as read_source
    from drafttools.acceptance.sources import read_pair
    from drafttools.acceptance.summary import summarize
    from drafttools.acceptance.tables import print_runs

    if (before is None) != (after is None) or not (sources or before):
        raise DraftToolsError("nothing to read: give files or URLs, or --before together with --after")
    rules = Rules(k, skip_first, exclude_above)
    evidence = load_evidence(report, audit)
    runs = [read_source(source, rules, interval) for source in sources or []]
    if before and after:
        runs.append(read_pair(str(before), str(after), rules))
    summaries = [summarize(run) for run in runs]
    _write_report(html, png, {"run": runs}, {"run": summaries}, evidence, None)
    if as_json:
        print(json.dumps({"runs": summaries}))
    else:
        print_runs(_console(), summaries)


def compare(
    baseline: Annotated[list[str], typer.Option(help="Sweeps without the change: FILE FILE ...")],
    candidate: Annotated[list[str], typer.Option(help="Sweeps with it: FILE FILE ...")],
    margin: Annotated[str, typer.Option(help="Difference that does not matter, of the baseline's length.")] = "1%",
    k: K = None,
    skip_first: SkipFirst = 0,
    exclude_above: ExcludeAbove = None,
    as_json: Json = False,
    html: Html = None,
    png: Png = None,
    report: Report = None,
    audit: Audit = None,
) -> None:
    """Print the verdict on the difference between two arms of sweeps."""
    from drafttools.acceptance.evidence import explain_drop, load_evidence
    from drafttools.acceptance.judge import compare as judge
    from drafttools.acceptance.records import Rules
    from drafttools.acceptance.tables import print_comparison

    rules, share = Rules(k, skip_first, exclude_above), _share(margin)
    evidence = load_evidence(report, audit)
    arms = {"baseline": _sweeps(baseline, rules), "candidate": _sweeps(candidate, rules)}
    result = judge(arms["baseline"], arms["candidate"], share)
    if result["verdict"] == "lower":
        result["explanation"] = explain_drop(evidence)
    summaries = {arm: result[arm]["sweeps"] for arm in arms}
    _write_report(html, png, arms, summaries, evidence, result)
    if as_json:
        print(json.dumps(result))
    else:
        print_comparison(_console(), result)


def _sweeps(sources: list[str], rules: Rules) -> list[Run]:
    from drafttools.acceptance.sources import read as read_source

    repeated = {source for source in sources if sources.count(source) > 1}
    if repeated:
        raise DraftToolsError(f"{sorted(repeated)[0]} is given twice in one arm; each sweep counts once")
    return [read_source(source, rules) for source in sources]


def _share(margin: str) -> float:
    try:
        percent = float(margin.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent < 100:
        raise DraftToolsError(f"--margin {margin}: not a percentage; give for example 1%")
    return percent / 100


def _write_report(
    html: Path | None,
    png: Path | None,
    arms: dict[str, list[Run]],
    summaries: dict[str, list[dict[str, Any]]],
    evidence: Evidence,
    result: dict[str, Any] | None,
) -> None:
    from drafttools.acceptance.evidence import checklist
    from drafttools.acceptance.report import write_report

    items = checklist(evidence, [run for runs in arms.values() for run in runs])
    write_report(html, png, dict(arms), summaries, items, result)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)
