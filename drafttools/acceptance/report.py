"""The report a reviewer gets: one HTML file that needs nothing else, and its figure as PNG."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from drafttools.acceptance.flags import FLAGS
from drafttools.acceptance.records import Run, merge_blocks
from drafttools.acceptance.tables import excluded_cells, run_cells, verdict_lines
from drafttools.errors import DraftToolsError

COLORS = {"baseline": "#1f77b4", "candidate": "#d62728", "run": "#1f77b4"}
DOTS_PER_SWEEP = 200
RUN_COLUMNS = ("source", "AL", "rate", "k", "drafts", "intervals", "empty", "excluded", "per position", "flags")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; width: 100%; }
th, td { border: 1px solid #ccc; padding: .3rem .5rem; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { background: #f2f2f2; } img { max-width: 100%; }
.verdict { border-left: .4rem solid #444; background: #f6f6f6; padding: .6rem 1rem; }
"""

Arms = dict[str, Sequence[Run]]


def draw(arms: Arms, bands: dict[str, float | None]) -> bytes:
    """The figure as PNG bytes: AL per sweep with its intervals, and the per-position rates.

    Args:
        arms: runs by arm name, `baseline` and `candidate`, or `run` alone.
        bands: standard deviation of the arms that get a band about their pooled AL.

    Raises:
        DraftToolsError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DraftToolsError("plots need matplotlib: pip install 'drafttools[plot]'") from None
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    lengths, positions = figure.subplots(1, 2)
    _draw_lengths(lengths, arms, bands)
    _draw_positions(positions, arms)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return out.getvalue()


def _draw_lengths(axes: Any, arms: Arms, bands: dict[str, float | None]) -> None:
    column, labels = 0, []
    for arm, runs in arms.items():
        for run in runs:
            _draw_sweep(axes, column, run, COLORS[arm])
            labels.append(_short(Path(run.source).name))
            column += 1
        _draw_band(axes, runs, bands.get(arm), COLORS[arm])
    axes.set_xticks(range(column), labels, rotation=20, ha="right")
    axes.set_xlim(-0.6, column - 0.4)
    axes.set_ylabel("acceptance length")
    axes.set_title("Sweeps, their intervals and excluded samples (x)", fontsize=10)
    axes.grid(axis="y", alpha=0.3)


def _short(name: str) -> str:
    """The end of a long name, where sweeps differ."""
    return name if len(name) <= 24 else f"…{name[-23:]}"


def _draw_sweep(axes: Any, column: int, run: Run, color: str) -> None:
    dots = [block.acceptance_length for block in merge_blocks(run.pool.blocks, DOTS_PER_SWEEP)]
    spread = [column + 0.25 * (index / max(1, len(dots) - 1) - 0.5) for index in range(len(dots))]
    axes.plot(spread, dots, ".", color=color, alpha=0.35)
    out = [sample.acceptance_length for sample in run.excluded if sample.acceptance_length is not None]
    axes.plot([column] * len(out), out, "x", color="#777")
    if run.pool.acceptance_length is not None:
        axes.plot([column], [run.pool.acceptance_length], "D", color=color, markeredgecolor="white", markersize=9)


def _draw_band(axes: Any, runs: Sequence[Run], deviation: float | None, color: str) -> None:
    drafts = sum(run.pool.drafts for run in runs)
    if deviation is None or not drafts:
        return
    length = 1 + sum(run.pool.accepted_with_drafts for run in runs) / drafts
    axes.axhspan(length - deviation, length + deviation, color=color, alpha=0.1, linewidth=0)
    axes.axhline(length, color=color, linewidth=1, linestyle="--")


def _draw_positions(axes: Any, arms: Arms) -> None:
    for arm, runs in arms.items():
        shown = False
        for run in runs:
            rates = run.pool.per_position
            if not rates:
                continue
            label = None if shown else arm
            axes.plot(range(1, len(rates) + 1), rates, "o-", color=COLORS[arm], alpha=0.7, label=label)
            shown = True
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of drafts accepted up to here")
    axes.set_title("Per-position acceptance", fontsize=10)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def write_report(
    html_path: Path | None,
    png_path: Path | None,
    arms: Arms,
    summaries: dict[str, list[dict[str, Any]]],
    checklist: Sequence[tuple[str, str]],
    result: dict[str, Any] | None = None,
) -> None:
    """Write the files that were asked for.

    Args:
        html_path: where the report goes, or None.
        png_path: where the figure goes, or None.
        arms: runs by arm.
        summaries: the same runs, summarized.
        checklist: what a reviewer asks for.
        result: the comparison, if there is one.

    Raises:
        DraftToolsError: matplotlib is not installed, or a file cannot be written.
    """
    if html_path is None and png_path is None:
        return
    figure = draw(arms, {"baseline": result["baseline"]["sd"]} if result else {})
    if png_path is not None:
        _write(png_path, figure)
    if html_path is not None:
        _write(html_path, page(figure, summaries, checklist, result).encode())


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise DraftToolsError(f"{path}: {error.strerror}; give a file that can be written") from None


def page(
    figure: bytes,
    summaries: dict[str, list[dict[str, Any]]],
    checklist: Sequence[tuple[str, str]],
    result: dict[str, Any] | None,
) -> str:
    """The HTML text; everything from outside is escaped."""
    runs = [run for arm in summaries.values() for run in arm]
    excluded = [sample for run in runs for sample in run["excluded_samples"]]
    flags = sorted({flag for run in runs for flag in run["flags"]})
    parts = ["<h1>Acceptance length</h1>"]
    if result:
        parts += [f'<p class="verdict">{"<br>".join(map(html.escape, verdict_lines(result)))}</p>']
    encoded = base64.b64encode(figure).decode()
    parts += [f'<img alt="acceptance length per sweep and per position" src="data:image/png;base64,{encoded}">']
    for arm, arm_runs in summaries.items():
        parts += [f"<h2>{html.escape(arm.capitalize())}</h2>", _table(RUN_COLUMNS, map(run_cells, arm_runs))]
    parts += ["<h2>Excluded samples</h2>"]
    columns = ("source", "where", "AL", "drafts", "rule")
    parts += [_table(columns, map(excluded_cells, excluded)) if excluded else "<p>None.</p>"]
    if flags:
        parts += ["<h2>Flags</h2>", _table(("flag", "meaning"), ((flag, FLAGS[flag]) for flag in flags))]
    parts += ["<h2>For the reviewer</h2>", _table(("item", "found"), checklist)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>Acceptance length</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}\n{body}\n</html>\n'


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"
