"""Whether a candidate's acceptance length differs from the baseline's, and by enough to matter.

The difference is pooled AL minus pooled AL. Its interval is a two-stage bootstrap: sweeps are drawn with replacement,
then blocks of consecutive intervals within each drawn sweep. Where a sweep has too few blocks to show its own spread,
the sampling noise of the drafts is added to what the bootstrap sees. Two one-sided tests (Schuirmann 1987) call arms
equivalent when the 90 % interval lies within the margin. `calibrate` measures what these rules get wrong.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drafttools.acceptance.flags import find_flags
from drafttools.acceptance.records import Pool, Run, merge_blocks
from drafttools.acceptance.summary import figures, summarize

REPLICATES = 2000
# Merging more intervals than this into blocks bounds the work and keeps neighbours, which share load, together.
BLOCKS_PER_SWEEP = 40
# With fewer blocks in a sweep the bootstrap cannot see the noise within it.
MIN_BLOCKS = 5
MIN_SWEEPS = 2
MIN_DRAFTS = 1000

VERDICTS = {
    "no_change": "equivalent within the margin",
    "lower": "acceptance length fell",
    "higher": "acceptance length rose; a rise is a change too",
    "inconclusive": "the data neither show a difference nor exclude one beyond the margin",
    "dead_draft": "acceptance length 1 with thousands of tokens drafted: wiring, not precision",
    "not_comparable": "the arms were not run alike",
    "not_evidence": "synthetic acceptance: the rate was chosen, not measured",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """The sweeps of one side."""

    runs: list[Run]
    pool: Pool

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Arm:
        pool = Pool()
        for run in runs:
            pool.merge(run.pool)
        return cls(list(runs), pool)

    def flags(self) -> list[str]:
        """The flags of the sweeps and of the arm as a whole."""
        found = set(find_flags(Run("", pool=self.pool)))
        return sorted(found.union(*(find_flags(run) for run in self.runs)))

    def settings(self, name: str) -> set[str]:
        """The values of a setting over the sweeps that tell it."""
        return {str(run.config[name]) for run in self.runs if name in run.config}

    def ks(self) -> set[int]:
        """Every k seen or configured."""
        return self.pool.ks.union(run.config["k"] for run in self.runs if "k" in run.config)

    def standard_deviation(self) -> float | None:
        """Of the interval ALs about the sweep ALs' mean, weighted by drafts; None with fewer than two intervals."""
        blocks = [block for run in self.runs for block in run.pool.blocks]
        length = self.pool.acceptance_length
        if len(blocks) < 2 or length is None:
            return None
        squares = sum(block.drafts * (block.acceptance_length - length) ** 2 for block in blocks)
        return math.sqrt(squares / self.pool.drafts * len(blocks) / (len(blocks) - 1))

    def sampling_error(self) -> float:
        """Standard error of the pooled AL were drafts independent.

        From the per-position rates r_i, E[X^2] = sum (2 i - 1) r_i for X accepted tokens a draft. Without rates the
        largest variance a mean m in [0, k] can have is used, m (k - m) (Bhatia and Davis 2000).
        """
        mean = (self.pool.acceptance_length or 1.0) - 1
        rates = self.pool.per_position
        if rates:
            variance = sum((2 * i + 1) * rate for i, rate in enumerate(rates)) - mean**2
        else:
            variance = mean * (max(self.ks(), default=math.ceil(mean) + 1) - mean)
        return math.sqrt(max(variance, 0.0) / self.pool.drafts)

    def summary(self) -> dict[str, Any]:
        return {
            **figures(self.pool),
            "sd": self.standard_deviation(),
            "flags": self.flags(),
            "sweeps": [summarize(run) for run in self.runs],
        }


def compare(
    baseline_runs: Sequence[Run],
    candidate_runs: Sequence[Run],
    margin: float = 0.01,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> dict[str, Any]:
    """Set two arms against each other.

    Args:
        baseline_runs: sweeps without the change, one run each.
        candidate_runs: sweeps with it.
        margin: difference that does not matter, as a share of the baseline's AL.
        replicates: bootstrap replicates.
        seed: of the bootstrap, so that the same data give the same answer.

    Returns:
        The object that `drafttools acceptance compare --json` prints: verdict, reasons, delta in tokens and percent,
        delta over the baseline's standard deviation, the 95 % interval of delta and the 90 % interval of the
        equivalence test, the excluded samples, both arms.
    """
    baseline, candidate = Arm.of(baseline_runs), Arm.of(candidate_runs)
    result: dict[str, Any] = {
        "verdict": "inconclusive",
        "reasons": [],
        "delta": None,
        "delta_pct": None,
        "delta_over_sd": None,
        "interval": None,
        "equivalence_interval": None,
        "explanation": None,
        "margin_pct": 100 * margin,
        "excluded": sum(len(run.excluded) for arm in (baseline, candidate) for run in arm.runs),
        "baseline": baseline.summary(),
        "candidate": candidate.summary(),
    }
    before, after = baseline.pool.acceptance_length, candidate.pool.acceptance_length
    if before is not None and after is not None:
        result.update(_difference(baseline, candidate, before, after, replicates, seed))
    result["verdict"], result["reasons"] = _verdict(baseline, candidate, result, margin)
    return result


def _difference(
    baseline: Arm, candidate: Arm, before: float, after: float, replicates: int, seed: int
) -> dict[str, Any]:
    delta = after - before
    deviation = baseline.standard_deviation()
    quantile = _bootstrap(baseline, candidate, delta, replicates, random.Random(seed))
    return {
        "delta": delta,
        "delta_pct": 100 * delta / before,
        "delta_over_sd": delta / deviation if deviation else None,
        "interval": [quantile(0.025), quantile(0.975)],
        "equivalence_interval": [quantile(0.05), quantile(0.95)],
    }


def _bootstrap(
    baseline: Arm, candidate: Arm, delta: float, replicates: int, rng: random.Random
) -> Callable[[float], float]:
    """The quantile function of the difference."""
    arms = [_blocks(baseline), _blocks(candidate)]
    draws = sorted(_resample(arms[1], rng) - _resample(arms[0], rng) for _ in range(replicates))
    spread = statistics.pstdev(draws)
    widened = _widened(spread, baseline, candidate, arms)
    if spread <= widened / 1e6:
        return lambda share: statistics.NormalDist(delta, widened).inv_cdf(share) if widened else delta
    return lambda share: delta + widened / spread * (draws[round(share * (replicates - 1))] - delta)


def _widened(spread: float, baseline: Arm, candidate: Arm, arms: list[list[list[tuple[int, int]]]]) -> float:
    """The standard error to use; the bootstrap's own where every sweep has enough blocks.

    Otherwise what it sees is the difference between sweeps, (J - 1) / J of it with J sweeps, and the sampling noise of
    the drafts is added.
    """
    if min(len(sweep) for arm in arms for sweep in arm) >= MIN_BLOCKS:
        return spread
    sweeps = min(len(arm) for arm in arms)
    between = spread * math.sqrt(sweeps / max(1, sweeps - 1))
    return math.hypot(between, baseline.sampling_error(), candidate.sampling_error())


def _blocks(arm: Arm) -> list[list[tuple[int, int]]]:
    """(accepted, drafts) of the blocks of each sweep that has any."""
    return [
        [(block.accepted, block.drafts) for block in merge_blocks(run.pool.blocks, BLOCKS_PER_SWEEP)]
        for run in arm.runs
        if run.pool.blocks
    ]


def _resample(sweeps: list[list[tuple[int, int]]], rng: random.Random) -> float:
    accepted = drafts = 0
    for sweep in rng.choices(sweeps, k=len(sweeps)):
        for block_accepted, block_drafts in rng.choices(sweep, k=len(sweep)):
            accepted += block_accepted
            drafts += block_drafts
    return accepted / drafts


def _verdict(baseline: Arm, candidate: Arm, result: dict[str, Any], margin: float) -> tuple[str, list[str]]:
    arms = {"baseline": baseline, "candidate": candidate}
    for verdict, flags in (("not_evidence", {"synthetic", "synthetic_suspected"}), ("dead_draft", {"dead_draft"})):
        if reasons := [f"{name}: {flag}" for name, arm in arms.items() for flag in arm.flags() if flag in flags]:
            return verdict, reasons
    if reasons := _differences_in_setup(baseline, candidate):
        return "not_comparable", reasons
    if reasons := [reason for name, arm in arms.items() for reason in _too_little(name, arm)]:
        return "inconclusive", reasons
    low, high = result["equivalence_interval"]
    allowed = margin * result["baseline"]["acceptance_length"]
    if -allowed < low and high < allowed:
        return "no_change", [f"the 90 % interval of the difference lies within {100 * margin:g} %"]
    low, high = result["interval"]
    if high < 0:
        return "lower", ["the 95 % interval of the difference lies below zero"]
    if low > 0:
        return "higher", ["the 95 % interval of the difference lies above zero"]
    return "inconclusive", ["the interval of the difference holds zero and reaches beyond the margin"]


def _differences_in_setup(baseline: Arm, candidate: Arm) -> list[str]:
    reasons = []
    ks = baseline.ks() | candidate.ks()
    if len(ks) > 1:
        reasons.append(f"k differs: {', '.join(map(str, sorted(ks)))}")
    for name in ("rejection_sample_method", "draft_sample_method", "sampling", "override_generation_config"):
        left, right = baseline.settings(name), candidate.settings(name)
        if left and right and left != right:
            reasons.append(f"{name} differs: {' / '.join(sorted(left))} against {' / '.join(sorted(right))}")
    return reasons


def _too_little(name: str, arm: Arm) -> list[str]:
    sweeps = sum(1 for run in arm.runs if run.pool.drafts)
    if sweeps < MIN_SWEEPS:
        return [f"{name}: {sweeps} sweep with drafts, {MIN_SWEEPS} are needed"]
    if arm.pool.drafts < MIN_DRAFTS:
        return [f"{name}: {arm.pool.drafts} drafts, {MIN_DRAFTS} are needed"]
    return []
