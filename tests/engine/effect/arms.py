"""What a lossy switch in the draft costs, and that drafttools gives it back: one engine an arm, one table.

    python -m tests.engine.effect.arms [--json OUT] [--report DIR]

The figures are printed whatever they are; judging them is the test's business (``tests/engine/test_effect.py``).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from tests.engine.effect.acceptance import Interval, acceptance_length, difference
from tests.engine.harness import ROOT, environment

HERE = pathlib.Path(__file__).parent
PLUGIN = HERE / "plugin"
CHECKPOINTS = HERE / "checkpoints"
TIMEOUT_S = 900

SWITCHES = {
    "INT4 all-reduce": {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"},
    "FP4 experts": {"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "1"},
}


@dataclass(frozen=True)
class Arm:
    """One run: a switch of ``SWITCHES`` or none, and whether drafttools is in."""

    switch: str = ""
    drafttools: bool = False

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.switch or "exact", "drafttools" if self.drafttools else "")))


EXACT = Arm()
ARMS = (EXACT, *(Arm(switch, drafttools) for switch in SWITCHES for drafttools in (False, True)))


@dataclass(frozen=True)
class Served:
    """What one arm's engine did.

    ``drafts`` (verify steps) and ``accepted`` (draft tokens) are vLLM's counters; each of ``requests`` has its own, and
    its output ``tokens``. ``workers`` holds the plugin's counts of each rank.
    """

    drafts: float
    accepted: float
    seconds: float
    requests: list[dict[str, Any]]
    workers: list[dict[str, dict[str, int]]]

    def count(self, place: str, what: str) -> int:
        """A count of one rank. Every rank does the same work; raises ValueError if they disagree."""
        values = {worker[place][what] for worker in self.workers}
        if len(values) != 1:
            raise ValueError(f"ranks disagree on {place} {what}: {sorted(values)}")
        return values.pop()

    @property
    def lowered_per_forward(self) -> float:
        """How often one target forward was lowered. Totals do not compare: a lower acceptance takes more forwards."""
        return self.count("target", "lowered") / self.count("target", "forwards")


def run(arm: Arm, report: pathlib.Path | None = None) -> Served:
    """Serve the prompts under one arm; ``report`` is where drafttools reports.

    Raises RuntimeError with the engine's output when it fails.
    """
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        command = [sys.executable, "-m", "tests.engine.effect.serve"]
        command += [str(CHECKPOINTS / "target"), str(CHECKPOINTS / "draft"), str(work / "served.json")]
        if arm.drafttools:
            launcher = [
                sys.executable,
                "-m",
                "drafttools.cli",
                "run",
                "--report",
                str(report or work / "reports"),
                "--",
            ]
            command = launcher + command
        environ = _environment(arm, work)
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"the engine of arm {str(arm)!r} failed:\n{(done.stdout + done.stderr)[-6000:]}")
        workers = [json.loads(path.read_text()) for path in work.glob("counts-*.json")]
        return Served(**json.loads((work / "served.json").read_text()), workers=workers)


def main(argv: list[str] | None = None) -> None:
    """Run the arms one after the other and print the table."""
    parser = argparse.ArgumentParser(description="Measure what a lossy switch in the draft costs.")
    parser.add_argument("--json", type=pathlib.Path, metavar="OUT", help="also write every figure to this file")
    parser.add_argument("--report", type=pathlib.Path, metavar="DIR", help="keep drafttools' reports here")
    options = parser.parse_args(argv)
    results = {arm: run(arm, options.report) for arm in ARMS}
    print(table(results))
    if options.json:
        figures = {
            "arms": {str(arm): asdict(served) for arm, served in results.items()},
            "differences": {name: asdict(change) for name, change in differences(results).items()},
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def differences(results: dict[Arm, Served]) -> dict[str, Interval]:
    """Change of the acceptance length: what each switch takes, what drafttools gives back, and what stays lost."""
    changes: dict[str, Interval] = {}
    for switch in SWITCHES:
        lowered, restored = Arm(switch), Arm(switch, drafttools=True)
        for first, second in ((EXACT, lowered), (lowered, restored), (EXACT, restored)):
            changes[f"{first} -> {second}"] = difference(results[first].requests, results[second].requests)
    return changes


def table(results: dict[Arm, Served]) -> str:
    """One row an arm, the differences below, and how many outputs drafttools left as they were."""
    header = ("arm", "drafts", "accepted", "acceptance length", "lowered: target/forward", "draft", "draft declined")
    rows = [header, *(_row(arm, served) for arm, served in results.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{name}: {_signed(change)}" for name, change in differences(results).items()]
    for switch in SWITCHES:
        same = same_outputs(results[Arm(switch)], results[Arm(switch, drafttools=True)])
        lines.append(
            f"{switch}: same output with and without drafttools in {same} of {len(results[EXACT].requests)} requests"
        )
    return "\n".join(lines)


def same_outputs(first: Served, second: Served) -> int:
    """Number of requests whose output tokens are the same in both arms."""
    pairs = zip(first.requests, second.requests, strict=True)
    return sum(a["tokens"] == b["tokens"] for a, b in pairs)


def _row(arm: Arm, served: Served) -> tuple[str, ...]:
    length = acceptance_length(served.requests)
    asked, lowered = served.count("draft", "asked"), served.count("draft", "lowered")
    return (
        str(arm),
        f"{served.drafts:.0f}",
        f"{served.accepted:.0f}",
        f"{length.estimate:.3f} [{length.low:.3f}, {length.high:.3f}]",
        f"{served.lowered_per_forward:.2f}",
        str(lowered),
        str(asked - lowered),
    )


def _signed(change: Interval) -> str:
    return f"{change.estimate:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"


def _environment(arm: Arm, counts: pathlib.Path) -> dict[str, str]:
    settings = {"PYTHONPATH": f"{PLUGIN}:{ROOT}", "ROCM_ON_CPU": str(counts), "VLLM_LOGGING_LEVEL": "ERROR"}
    settings.update(SWITCHES.get(arm.switch, {}))
    if not arm.drafttools:
        settings["DRAFTTOOLS"] = "off"
    return environment(**settings)


if __name__ == "__main__":
    main()
