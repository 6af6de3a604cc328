"""How certain a median is."""

from __future__ import annotations

import random
import statistics

RESAMPLES = 2000


def median_interval(values: list[float]) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the median; the same every time for the same values."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
