"""What a lossy all-reduce in the draft costs, and that drafttools gives it back: three engines, one table.

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
from dataclasses import asdict
from typing import Any

from tests.engine.effect.acceptance import acceptance_length, difference
from tests.engine.harness import ROOT, environment

HERE = pathlib.Path(__file__).parent
PLUGIN = HERE / "plugin"
CHECKPOINTS = HERE / "checkpoints"
CODEC = "INT4"
TIMEOUT_S = 900

ARMS = {"no codec": "NONE", "codec": CODEC, "codec, drafttools": CODEC}
SHIMMED = "codec, drafttools"
COMPARISONS = (("no codec", "codec"), ("codec", SHIMMED), ("no codec", SHIMMED))


def run(arm: str, report: pathlib.Path | None = None) -> dict[str, Any]:
    """Serve the prompts under one arm. Returns its counts, acceptance and requests.

    ``report`` is where drafttools writes its reports in the arm that runs under it. Raises RuntimeError with the
    engine's output when it fails.
    """
    with tempfile.TemporaryDirectory() as work:
        out = pathlib.Path(work) / "out.json"
        command = [sys.executable, "-m", "tests.engine.effect.serve"]
        command += [str(CHECKPOINTS / "target"), str(CHECKPOINTS / "draft"), str(out)]
        if arm == SHIMMED:
            launcher = [sys.executable, "-m", "drafttools.cli", "run", "--report", str(report or work), "--"]
            command = launcher + command
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_environment(arm, work),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the engine of arm {arm!r} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        served: dict[str, Any] = json.loads(out.read_text())
        served["workers"] = [json.loads(path.read_text()) for path in pathlib.Path(work).glob("counts-*.json")]
    served["acceptance_length"] = asdict(acceptance_length(served["requests"]))
    return served


def main(argv: list[str] | None = None) -> None:
    """Run the arms one after the other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, metavar="OUT", help="also write every figure to this file")
    parser.add_argument("--report", type=pathlib.Path, metavar="DIR", help="keep drafttools' reports here")
    options = parser.parse_args(argv)
    arms = {arm: run(arm, options.report) for arm in ARMS}
    print(table(arms))
    if options.json:
        options.json.write_text(json.dumps({"arms": arms, "differences": differences(arms)}, indent=1) + "\n")


def differences(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Change of the acceptance length from arm to arm, keyed ``first -> second``."""
    return {
        f"{first} -> {second}": asdict(difference(arms[first]["requests"], arms[second]["requests"]))
        for first, second in COMPARISONS
    }


def reduces(served: dict[str, Any], place: str, what: str) -> int:
    """A count of one rank; every rank takes part in every all-reduce, so all must agree. Raises ValueError if not."""
    values = {worker[place][what] for worker in served["workers"]}
    if len(values) != 1:
        raise ValueError(f"ranks disagree on {place} {what}: {sorted(values)}")
    return int(values.pop())


def per_forward(served: dict[str, Any]) -> float:
    """Codec reductions in one target forward.

    A lower acceptance takes more forwards, so only the count per forward can be compared between arms.
    """
    return reduces(served, "target", "codec") / reduces(served, "target", "forwards")


def same_outputs(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Number of requests whose output tokens are the same in both arms."""
    pairs = zip(first["requests"], second["requests"], strict=True)
    return sum(a["tokens"] == b["tokens"] for a, b in pairs)


def table(arms: dict[str, dict[str, Any]]) -> str:
    """The three arms, one a row, and the differences below."""
    columns = (
        "arm",
        "drafts",
        "accepted",
        "acceptance length",
        "target codec/forward",
        "draft codec",
        "draft declined",
    )
    rows = [columns, *(_row(arm, served) for arm, served in arms.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, change in differences(arms).items():
        lines.append(f"{name}: {change['estimate']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]")
    same = same_outputs(arms["codec"], arms[SHIMMED])
    total = len(arms["codec"]["requests"])
    lines.append(f"requests with the same output under the codec, without and with drafttools: {same} of {total}")
    return "\n".join(lines)


def _row(arm: str, served: dict[str, Any]) -> tuple[str, ...]:
    length = served["acceptance_length"]
    asked, codec = (reduces(served, "draft", what) for what in ("asked", "codec"))
    return (
        arm,
        f"{served['drafts']:.0f}",
        f"{served['accepted']:.0f}",
        f"{length['estimate']:.3f} [{length['low']:.3f}, {length['high']:.3f}]",
        f"{per_forward(served):.2f}",
        str(codec),
        str(asked - codec) if ARMS[arm] != "NONE" else "0",
    )


def _environment(arm: str, counts: str) -> dict[str, str]:
    return environment(
        PYTHONPATH=f"{PLUGIN}:{ROOT}",
        QUICK_REDUCE_ON_CPU=counts,
        VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=ARMS[arm],
        VLLM_LOGGING_LEVEL="ERROR",
    )


if __name__ == "__main__":
    main()
