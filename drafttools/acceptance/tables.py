"""Runs and comparisons as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafttools.acceptance.flags import FLAGS
from drafttools.acceptance.judge import VERDICTS


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where the source does not tell."""
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}"


def print_runs(console: Console, runs: list[dict[str, Any]]) -> None:
    """One row a run, then what its flags mean and what was left out."""
    table = Table(title="Acceptance length")
    for name in ("source", "AL", "rate", "k", "drafts", "intervals", "empty", "excluded", "per position", "flags"):
        table.add_column(name, overflow="fold")
    for run in runs:
        table.add_row(*map(Text, run_cells(run)))
    console.print(table)
    print_excluded(console, runs)
    for flag in sorted({flag for run in runs for flag in run["flags"]}):
        console.print(f"{flag}: {FLAGS[flag]}", markup=False, highlight=False)
    for run in runs:
        if run["skipped"]:
            console.print(f"{run['source']}: {run['skipped']} unreadable records skipped", markup=False)


def run_cells(run: dict[str, Any]) -> list[str]:
    """The cells of a run's row, as text."""
    return [
        str(run["source"]),
        number(run["acceptance_length"]),
        number(run["acceptance_rate"]),
        number(run["k"]),
        number(run["drafts"]),
        number(run["intervals"]),
        number(run["empty_intervals"]),
        number(run["excluded"]),
        " ".join(number(rate) for rate in run["per_position"] or []) or "-",
        ", ".join(run["flags"]) or "-",
    ]


def print_excluded(console: Console, runs: list[dict[str, Any]]) -> None:
    """Every sample left out, with its rule."""
    excluded = [sample for run in runs for sample in run["excluded_samples"]]
    if not excluded:
        return
    table = Table(title="Excluded samples")
    for name in ("source", "where", "AL", "drafts", "rule"):
        table.add_column(name, overflow="fold")
    for sample in excluded:
        table.add_row(*map(Text, excluded_cells(sample)))
    console.print(table)


def excluded_cells(sample: dict[str, Any]) -> list[str]:
    """The cells of an excluded sample's row, as text."""
    return [
        sample["source"],
        sample["where"],
        number(sample["acceptance_length"]),
        number(sample["drafts"]),
        sample["reason"],
    ]


def print_comparison(console: Console, result: dict[str, Any]) -> None:
    """Both arms' sweeps, then the verdict."""
    for arm in ("baseline", "candidate"):
        console.print(arm.capitalize(), style="bold")
        print_runs(console, result[arm]["sweeps"])
    for line in verdict_lines(result):
        console.print(line, markup=False, highlight=False)


def verdict_lines(result: dict[str, Any]) -> list[str]:
    """The verdict in sentences."""
    lines = [f"{result['verdict']}: {VERDICTS[result['verdict']]} ({'; '.join(result['reasons'])})"]
    if result["delta"] is not None:
        low, high = result["interval"]
        lines.append(
            f"AL {result['baseline']['acceptance_length']:.3f} -> {result['candidate']['acceptance_length']:.3f}: "
            f"{result['delta']:+.3f} ({result['delta_pct']:+.2f} %), 95 % interval {low:+.3f} to {high:+.3f}, "
            f"{number(result['delta_over_sd'], 2)} of the baseline's standard deviation, "
            f"margin {result['margin_pct']:g} %"
        )
    if result.get("explanation"):
        lines.append(result["explanation"])
    return lines
