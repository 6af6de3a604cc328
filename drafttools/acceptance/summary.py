"""A run as the JSON object that `drafttools acceptance --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from drafttools.acceptance.flags import find_flags
from drafttools.acceptance.records import Pool, Run


def summarize(run: Run) -> dict[str, Any]:
    """One run's figures; None where the source cannot tell."""
    return {
        "source": run.source,
        "speculation": run.speculation,
        **figures(run.pool),
        "intervals": run.pool.intervals,
        "empty_intervals": run.pool.empty,
        "excluded": len(run.excluded),
        "excluded_samples": [asdict(exclusion) for exclusion in run.excluded],
        "skipped": run.skipped,
        "flags": find_flags(run),
        "config": run.config,
    }


def figures(pool: Pool) -> dict[str, Any]:
    """The pooled numbers of one run or one arm."""
    told = pool.intervals > 0
    return {
        "acceptance_length": pool.acceptance_length,
        "acceptance_rate": pool.acceptance_rate,
        "k": pool.k,
        "drafts": pool.drafts if told and not pool.unknown else None,
        "accepted": pool.accepted if told else None,
        "drafted": pool.drafted if told and pool.drafted_known else None,
        "per_position": pool.per_position,
        "conditional": pool.conditional,
    }
