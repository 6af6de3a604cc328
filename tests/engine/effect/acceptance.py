"""Acceptance length of one arm, and of the difference between two, with bootstrap intervals over requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its percentile-bootstrap interval at ``LEVEL``."""

    estimate: float
    low: float
    high: float


def acceptance_length(requests: list[dict[str, Any]]) -> Interval:
    """Output tokens per verify step, ``1 + accepted / drafts``, from each request's ``drafts`` and ``accepted``."""
    lengths = _resampled(requests)
    return _interval(float(lengths[0]), lengths[1:])


def difference(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Interval:
    """Acceptance length of ``second`` minus that of ``first``, paired: request ``i`` has the same prompt in both.

    Raises ValueError when the two differ in number.
    """
    if len(first) != len(second):
        raise ValueError(f"cannot pair {len(first)} requests with {len(second)}")
    lengths = _resampled(second) - _resampled(first)
    return _interval(float(lengths[0]), lengths[1:])


def _resampled(requests: list[dict[str, Any]]) -> NDArray[np.float64]:
    """Acceptance length of all requests, then of ``RESAMPLES`` resamples; the same choice of indices for every arm."""
    drafts = np.array([request["drafts"] for request in requests], dtype=np.float64)
    accepted = np.array([request["accepted"] for request in requests], dtype=np.float64)
    chosen = np.random.default_rng(0).integers(len(requests), size=(RESAMPLES, len(requests)))
    chosen = np.vstack([np.arange(len(requests)), chosen])
    lengths: NDArray[np.float64] = 1 + accepted[chosen].sum(axis=1) / drafts[chosen].sum(axis=1)
    return lengths


def _interval(estimate: float, resampled: NDArray[np.float64]) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high))
