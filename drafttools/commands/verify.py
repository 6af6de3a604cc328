"""`drafttools verify`: the same prompts without and with the shim, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafttools.errors import DraftToolsError

if TYPE_CHECKING:
    from drafttools.acceptance.verify import Served, Verification


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)


def verify(
    model: Annotated[str, typer.Option(help="Target checkpoint or repository.")],
    speculative_config: Annotated[str, typer.Option(help="JSON, as for `vllm serve`.")],
    prompts: Annotated[
        Path | None, typer.Option(help="One prompt a line: text, or JSON as LLM.generate takes.")
    ] = None,
    engine_args: Annotated[str, typer.Option(help="JSON with further arguments of vllm.LLM.")] = "{}",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy, and outputs must be equal.")] = 0.0,
    report: Annotated[Path | None, typer.Option(help="Keep the reports of the run with the shim here.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each of the two runs.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Exit 0 if the shim is in effect and greedy outputs agree, 1 if not, 2 for bad usage."""
    from drafttools.acceptance.verify import PROMPTS
    from drafttools.acceptance.verify import verify as run_twice

    extra = _object("--engine-args", engine_args)
    engine = {**extra, "model": model, "speculative_config": _object("--speculative-config", speculative_config)}
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": 0}
    if engine.get("skip_tokenizer_init"):
        sampling["detokenize"] = False
    found = run_twice(engine, _prompts(prompts) if prompts else PROMPTS, sampling, report, timeout)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        _print(found)
    raise typer.Exit(1 if found.problems else 0)


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise DraftToolsError(f"{option}: not JSON ({error}); quote it as one word") from None
    if not isinstance(loaded, dict):
        raise DraftToolsError(f"{option}: not a JSON object; give {{...}}")
    return loaded


def _prompts(path: Path) -> list[Any]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DraftToolsError(f"--prompts {path}: {error}; give a text file, one prompt a line") from None
    if not lines:
        raise DraftToolsError(f"--prompts {path}: empty; give one prompt a line")
    return [_prompt(line) for line in lines]


def _prompt(line: str) -> Any:
    try:
        loaded = json.loads(line)
    except ValueError:
        return line
    return loaded if isinstance(loaded, dict) else line


def _print(found: Verification) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("", "shim off", "shim on")
    for (name, off), (_, on) in zip(_rows(found.off), _rows(found.on), strict=True):
        table.add_row(name, Text(off), Text(on))
    table.add_row("draft in effect", "-", "yes" if found.status and found.status.in_effect else "no")
    for name, value in _report_rows(found):
        table.add_row(name, "-", Text(value))
    console.print(table)
    for problem in found.problems:
        console.print(problem, markup=False, highlight=False)
    if not found.problems:
        compared = "greedy outputs agree" if found.as_json()["outputs_compared"] else "outputs were not compared"
        console.print(f"in effect; {compared}")


def _rows(served: Served) -> list[tuple[str, str]]:
    from drafttools.acceptance.tables import number

    figures = served.acceptance or {}
    return [
        ("acceptance length", number(figures.get("acceptance_length"))),
        ("acceptance rate", number(figures.get("acceptance_rate"))),
        ("per position", " ".join(number(rate) for rate in figures.get("per_position") or []) or "-"),
        ("drafts", number(figures.get("drafts"))),
        ("tokens/s", number(served.tokens_per_second, 1)),
        ("failure", served.failure or "-"),
    ]


def _report_rows(found: Verification) -> list[tuple[str, str]]:
    from drafttools.acceptance.evidence import Evidence, checklist

    if found.status is None:
        return []
    wanted = ("effective precision (report)", "patches", "gates, declined of asked", "reaching the draft ungated")
    return [(name, value) for name, value in checklist(Evidence(found.status), []) if name in wanted]
