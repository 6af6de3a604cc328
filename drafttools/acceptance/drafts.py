"""How many drafts a log line stands for: the one number the line does not print.

vLLM prints Accepted, Drafted, a mean acceptance length (two decimals) and, mostly, per-position rates (three decimals)
(0.33.0, v1/spec_decode/metrics.py, SpecDecodingLogging.log). Drafts is Drafted / k where that agrees, to rounding,
with what was printed. Otherwise some steps drafted fewer than k tokens, and the printed figures themselves bound it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

HALF_LENGTH_DIGIT = 0.005
HALF_RATE_DIGIT = 0.0005
# Beyond this many candidates the printed rates no longer single one out.
MAX_CANDIDATES = 64
MAX_K = 64


class DraftCount(NamedTuple):
    """Drafts of one line; `exact` is False where rounded figures leave a choice; None, None where nothing tells."""

    drafts: int | None
    k: int | None
    exact: bool


def count_drafts(
    accepted: int, drafted: int, k: int | None, length: float | None, rates: Sequence[float]
) -> DraftCount:
    """Infer the number of drafts behind one line.

    Args:
        accepted: accepted draft tokens.
        drafted: proposed draft tokens, more than zero.
        k: draft tokens a full step, if known; the number of rates is used where there are any.
        length: the printed mean acceptance length, with or without the bonus token, or None.
        rates: the printed unconditional per-position rates, possibly none.
    """
    k = len(rates) or k
    low, high = _bounds(accepted, length, rates)
    if k is None:
        k = _full_step(drafted, low, high) if length is not None else None
    if k is not None and drafted % k == 0 and low <= drafted / k <= high:
        return DraftCount(drafted // k, k, True)
    if length is None and not rates:
        return DraftCount(-(-drafted // k) if k else None, k, False)
    fewest = max(math.ceil(low), -(-drafted // k) if k else 1)
    if not math.isfinite(high) or high < fewest:
        return DraftCount(fewest, k, False)
    return DraftCount(_pick(fewest, math.floor(high), accepted, rates), k, False)


def _bounds(accepted: int, length: float | None, rates: Sequence[float]) -> tuple[float, float]:
    """Fewest and most drafts that print as this length and these rates."""
    per_rates = _range(accepted, sum(rates), HALF_RATE_DIGIT * len(rates)) if rates else (0.0, math.inf)
    if length is None:
        return per_rates
    per_length = _range(accepted, _per_draft(length, rates), HALF_LENGTH_DIGIT)
    low, high = max(per_rates[0], per_length[0]), min(per_rates[1], per_length[1])
    # The Rust front end takes the rates and the length from two snapshots; the length goes with the printed counts.
    return (low, high) if low <= high else per_length


def _range(accepted: int, per_draft: float, half_digit: float) -> tuple[float, float]:
    slack = half_digit + 1e-9
    low = accepted / (per_draft + slack)
    return low, accepted / (per_draft - slack) if accepted and per_draft > slack else math.inf


def _per_draft(length: float, rates: Sequence[float]) -> float:
    """Accepted tokens a draft; the first V1 releases printed the length without the bonus token."""
    without_bonus = bool(rates) and abs(length - sum(rates)) < abs(length - 1 - sum(rates))
    return length if without_bonus else length - 1


def _full_step(drafted: int, low: float, high: float) -> int | None:
    """The only k for which every step drafted k, or None if there is none or a choice."""
    fits = [k for k in range(1, MAX_K + 1) if drafted % k == 0 and low <= drafted / k <= high]
    return fits[0] if len(fits) == 1 else None


def _pick(low: int, high: int, accepted: int, rates: Sequence[float]) -> int:
    """The middle of the draft counts for which the rates are whole numbers of tokens that sum to `accepted`."""
    candidates = range(low, high + 1)
    if rates and len(candidates) <= MAX_CANDIDATES:
        whole = [n for n in candidates if sum(position_counts(n, rates)) == accepted and _prints(n, rates)]
        return whole[len(whole) // 2] if whole else candidates[len(candidates) // 2]
    return candidates[len(candidates) // 2]


def _prints(drafts: int, rates: Sequence[float]) -> bool:
    counts = position_counts(drafts, rates)
    return all(abs(c / drafts - r) <= HALF_RATE_DIGIT + 1e-9 for c, r in zip(counts, rates, strict=True))


def position_counts(drafts: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Accepted tokens per position; exact for fewer than 1000 drafts, else to three digits of the rate."""
    return tuple(round(rate * drafts) for rate in rates)
