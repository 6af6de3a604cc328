"""Run every GPU engine case on this machine and write what came out.

    python -m tests.gpu.validate --out DIR            # DIR/results.json, DIR/record.md, DIR/logs.tar.gz
    python -m tests.gpu.validate --render A.json ...  # the record of earlier results, later files over earlier ones

Needs a CUDA device and vLLM. All engines share the one GPU; a run of all of them takes about seven minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu import cases
from tests.gpu.engines import Engine, Outcome, inspect_models, run


def main(argv: list[str] | None = None) -> None:
    """The command line; exits 1 when a check fails or was not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.validate", description=__doc__)
    parser.add_argument("--out", type=Path, help="directory for the results")
    parser.add_argument("--render", type=Path, nargs="+", help="write the record of these results to standard output")
    parser.add_argument("--only", default="", help="regular expression on engine names")
    parser.add_argument("--at-once", type=int, default=20, help="engines alive at a time (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=450, help="seconds for loading and serving (default: %(default)s)"
    )
    parser.add_argument(
        "--turns-budget", type=float, default=300, help="seconds for timed rounds (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=cases.TURNS, help="timed rounds (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.render:
        print(record(merged(options.render)))
        return
    if options.out is None:
        parser.error("give --out or --render")
    results = validate(
        options.out, chosen(options.only), options.at_once, options.budget, options.turns, options.turns_budget
    )
    rows = verdicts(results)
    for name, verdict, detail in sorted(rows, key=lambda row: row[1] != "not run"):
        print(f"{verdict:8} {name}: {detail[:180]}")
    sys.exit(any(verdict != "holds" for _, verdict, _ in rows))


def chosen(only: str) -> list[Engine]:
    """The engines whose name the regular expression finds."""
    return [engine for engine in cases.ENGINES if re.search(only, engine.name)]


def validate(
    out: Path, engines: list[Engine], at_once: int, budget_s: float, turns: int, turns_s: float
) -> dict[str, Any]:
    """Make the checkpoints, run the engines, write the files, and return the results as they were written."""
    from tests.gpu import checkpoints

    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drafttools-gpu-") as work:
        directory = Path(work)
        inspection = inspect_models(directory / "engines", engines)
        checkpoints.make(directory / "checkpoints", (engine.model for engine in engines))
        inspection.wait()
        print(f"checkpoints made in {time.monotonic() - started:.0f} s", flush=True)
        outcomes = run(
            engines,
            directory / "checkpoints",
            directory / "engines",
            question=cases.QUESTION,
            turn=cases.TURN,
            turns=turns,
            at_once=at_once,
            deadline=started + budget_s,
            turns_s=turns_s,
        )
        results = {"environment": environment(), "outcomes": {n: asdict(o) for n, o in outcomes.items()}}
        (out / "results.json").write_text(json.dumps(results))
        (out / "record.md").write_text(record(results))
        _pack_logs(directory / "engines", out / "logs.tar.gz")
    print(f"all done in {time.monotonic() - started:.0f} s", flush=True)
    return results


def _pack_logs(engines: Path, target: Path) -> None:
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(engines.glob("*/std*")):
            archive.add(path, arcname=f"{path.parent.name}.{path.name}")


def environment() -> dict[str, Any]:
    """When, with what command, on what."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        gpu = f"nvidia-smi failed: {error}"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m tests.gpu.validate {' '.join(sys.argv[1:])}",
        "gpu": gpu,
        "python": platform.python_version(),
        "system": platform.platform(),
        "tilelang": "installed" if importlib.util.find_spec("tilelang") else "not installed",
    }


def merged(paths: list[Path]) -> dict[str, Any]:
    """Several results as one: for each engine there still is, the last file with an answer of it, else the last."""
    outcomes: dict[str, Any] = {}
    environments = []
    known = {engine.name for engine in cases.ENGINES}
    for path in paths:
        results = json.loads(path.read_text())
        environments.append(results["environment"])
        for name, outcome in results["outcomes"].items():
            if name in known and (outcome["answers"] or not outcomes.get(name, {}).get("answers")):
                outcomes[name] = outcome
    commands = "`; `".join(environment["command"] for environment in environments)
    gpus = " or ".join(dict.fromkeys(environment["gpu"].replace("\n", " and ") for environment in environments))
    return {"environment": {**environments[-1], "command": commands, "gpu": gpus}, "outcomes": outcomes}


def outcomes_of(results: dict[str, Any]) -> dict[str, Outcome]:
    """The outcomes in results that were written or read."""
    return {name: Outcome(**values) for name, values in results["outcomes"].items()}


def verdicts(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Every check with its verdict and what was seen."""
    outcomes = outcomes_of(results)
    return [(check.name, *check.verdict(outcomes)) for check in cases.CHECKS]


def record(results: dict[str, Any]) -> str:
    """The results as a Markdown page."""
    env, outcomes, rows = results["environment"], outcomes_of(results), verdicts(results)
    versions = next((o.ready for o in outcomes.values() if o.ready), {})
    count = {verdict: sum(row[1] == verdict for row in rows) for verdict in ("holds", "fails", "not run")}
    lines = [
        f"# GPU engines, {env['date']}",
        "",
        f"Command: `{env['command']}`",
        "",
        f"- GPU and driver: {env['gpu']}",
        f"- vLLM {versions.get('vllm', 'unknown')}, torch {versions.get('torch', 'unknown')}, Python {env['python']}",
        f"- {env['system']}",
        "",
        f"{count['holds']} checks hold, {count['fails']} fail, {count['not run']} were not run.",
        "",
        "| check | verdict | seen |",
        "|---|---|---|",
        *(f"| {name} | {verdict} | {_cell(detail)} |" for name, verdict, detail in rows),
        "",
        "## Engines",
        "",
        "| engine | acceptance length | load, s | idle GPU memory, MiB | tokens/s in turns | error |",
        "|---|---|---|---|---|---|",
        *(_engine_row(name, outcome) for name, outcome in outcomes.items()),
        "",
        "## Not covered",
        "",
        *(f"- {sentence}" for sentence in cases.NOT_COVERED),
        f"- TileLang on the machine: {env['tilelang']}.",
        "",
    ]
    return "\n".join(lines)


def _engine_row(name: str, outcome: Outcome) -> str:
    length = f"{cases.acceptance_length(outcome.answers[:1]):.3f}" if outcome.answers else ""
    memory = f"{outcome.ready['memory'] / 2**20:.1f}" if outcome.ready.get("memory") else ""
    load = f"{outcome.ready['load_s']:.0f}" if "load_s" in outcome.ready else ""
    speed = cases.spread(cases.rates(outcome)) if len(outcome.answers) > 1 else ""
    return f"| {name} | {length} | {load} | {memory} | {speed} | {_cell(outcome.error)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
