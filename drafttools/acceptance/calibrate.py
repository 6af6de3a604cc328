"""How often the judge is wrong, by simulation: `python -m drafttools.acceptance.calibrate`.

Each simulated arm is two sweeps of 10,000 drafts. A draft's tokens are accepted one after the other, each with its own
probability, so the counts per position are exact binomial chains. Prompts that differ between intervals, and sweeps
that differ as a whole, scale all the probabilities of an interval alike.
"""

from __future__ import annotations

import argparse
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from drafttools.acceptance.judge import compare
from drafttools.acceptance.records import Rules, Run, Sample
from drafttools.errors import DraftToolsError

# Conditional acceptance by position; acceptance length 3.97 at k = 5.
CONDITIONAL = (0.94, 0.85, 0.76, 0.68, 0.52)
SWEEPS = 2
DRAFTS_PER_SWEEP = 10_000


@dataclass(frozen=True, slots=True)
class Scene:
    """One kind of data: intervals a sweep, and the spread (standard deviation, share of AL) beyond sampling noise.

    Intervals of 1,000 drafts have 1.2 % of sampling noise. `hard` marks data on which two sweeps cannot show a 3 % drop
    reliably by any method; false alarms are held to the same bound there, detection is only reported.
    """

    name: str
    intervals: int
    interval_spread: float
    sweep_spread: float
    hard: bool = False


SCENES = (
    Scene("10 intervals, independent drafts", 10, 0.0, 0.0),
    Scene("10 intervals that differ by 1 %", 10, 0.01, 0.0),
    Scene("10 intervals by 1 %, sweeps by 0.3 %", 10, 0.01, 0.003),
    Scene("50 intervals by 3 %, sweeps by 0.3 %", 50, 0.03, 0.003),
    Scene("one scrape a sweep, sweeps by 0.3 %", 1, 0.0, 0.003),
    Scene("hard: 10 intervals by 3 %, sweeps by 0.3 %", 10, 0.03, 0.003, hard=True),
)
EFFECTS = (0.0, -0.01, -0.03, 0.03)


def acceptance_length(scale: float) -> float:
    """AL when every conditional probability is scaled, at most to 1."""
    total = reached = 1.0
    for probability in CONDITIONAL:
        reached *= min(1.0, scale * probability)
        total += reached
    return total


@cache
def _lengths() -> tuple[list[float], list[float]]:
    """AL by scale, up to a draft that is never rejected."""
    scales = [step / 2000 for step in range(round(2000 / min(CONDITIONAL)) + 1)]
    return [acceptance_length(scale) for scale in scales], scales


def scale_for(length: float) -> float:
    """The scale that gives this AL, interpolated."""
    lengths, scales = _lengths()
    place = min(max(bisect(lengths, length), 1), len(lengths) - 1)
    share = (length - lengths[place - 1]) / (lengths[place] - lengths[place - 1])
    return scales[place - 1] + share * (scales[place] - scales[place - 1])


def simulate_arm(scene: Scene, effect: float, rng: Any) -> list[Run]:
    """Two sweeps whose AL is changed by `effect` (a share); `rng` is a numpy Generator."""
    return [_simulate_sweep(scene, effect, rng, f"sweep {index}") for index in range(SWEEPS)]


def _simulate_sweep(scene: Scene, effect: float, rng: Any, name: str) -> Run:
    run = Run(name)
    sweep = acceptance_length(1.0) * (1 + effect) * (1 + scene.sweep_spread * rng.standard_normal())
    drafts = DRAFTS_PER_SWEEP // scene.intervals
    for interval in range(scene.intervals):
        scale = scale_for(sweep * (1 + scene.interval_spread * rng.standard_normal()))
        positions, reached = [], drafts
        for probability in CONDITIONAL:
            reached = int(rng.binomial(reached, min(1.0, scale * probability)))
            positions.append(reached)
        k = len(CONDITIONAL)
        sample = Sample(f"interval {interval}", sum(positions), drafts * k, drafts, k, tuple(positions))
        run.take(sample, Rules())
    return run


def verdicts(scene: Scene, effect: float, simulations: int, seed: int, replicates: int) -> Counter[str]:
    """How often each verdict falls."""
    try:
        import numpy
    except ImportError:
        raise DraftToolsError("the calibration needs numpy: pip install numpy") from None
    rng = numpy.random.default_rng(seed)
    found: Counter[str] = Counter()
    for number in range(simulations):
        baseline, candidate = simulate_arm(scene, 0.0, rng), simulate_arm(scene, effect, rng)
        found[compare(baseline, candidate, replicates=replicates, seed=number)["verdict"]] += 1
    return found


def lines(simulations: int, seed: int, replicates: int) -> Iterator[str]:
    """The table, in Markdown, and the two figures the judge is held to."""
    yield f"{simulations} comparisons a row, two sweeps of {DRAFTS_PER_SWEEP} drafts an arm, margin 1 %, seed {seed}."
    yield ""
    yield "| data | true change | no_change | lower | higher | inconclusive |"
    yield "|---|---|---|---|---|---|"
    worst_false, worst_detection = 0.0, 1.0
    for scene in SCENES:
        for effect in EFFECTS:
            found = verdicts(scene, effect, simulations, seed, replicates)
            share = {name: found[name] / simulations for name in ("no_change", "lower", "higher", "inconclusive")}
            if effect == 0.0:
                worst_false = max(worst_false, share["lower"])
            if effect == -0.03 and not scene.hard:
                worst_detection = min(worst_detection, share["lower"])
            cells = " | ".join(f"{100 * value:.1f} %" for value in share.values())
            yield f"| {scene.name} | {100 * effect:+.0f} % | {cells} |"
    yield ""
    yield f"Worst false `lower` under no change: {100 * worst_false:.1f} %."
    yield f"Worst detection of a 3 % drop, hard data aside: {100 * worst_detection:.1f} %."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Calibrate the acceptance judge by simulation.")
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--replicates", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for line in lines(arguments.simulations, arguments.seed, arguments.replicates):
        print(line, flush=True)


if __name__ == "__main__":
    main()
