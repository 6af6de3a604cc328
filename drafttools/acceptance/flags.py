"""What a reader of an acceptance length must know before using it, from the pooled counts and the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from drafttools.acceptance.records import Pool, Run

FLAGS = {
    "synthetic": "the configuration asks for synthetic acceptance: the rate was chosen, not measured",
    "synthetic_suspected": "per-position rates are 1, ..., 1, a fraction, 0, ..., 0: vLLM's synthetic schedule",
    "dead_draft": "next to nothing of thousands of drafted tokens was accepted: wiring, not precision",
    "k_exceeds_block": "no token was ever accepted beyond some position although one just before it often was",
    "k_varies": "lines with different k were pooled",
    "counter_reset": "a counter fell between the scrapes: the server restarted, only the time since then counts",
    "engine_missing": "an engine of the first scrape is absent from the second and was left out",
    "drafts_estimated": "the number of drafts follows from rounded figures, because steps drafted fewer than k tokens",
    "drafts_unknown": "some lines do not tell their number of drafts and are in the rate but not in the length",
    "config_varies": "the log holds several server starts with different settings",
    "truncated": "the compressed file ends early; what could be read was read",
}

# Rates print with three digits: fewer drafts than this can print 1.000 or 0.000 by chance.
MIN_DRAFTS_FOR_SHAPE = 200
# "AL 1 with thousands drafted"; a draft in a foreign dtype accepted 0 of 1,100.
MIN_DRAFTED_FOR_DEAD = 1000


def find_flags(run: Run) -> list[str]:
    """All flags of a run: those its reader set and those its counts show."""
    flags = set(run.flags)
    pool = run.pool
    if is_synthetic_config(run.config):
        flags.add("synthetic")
    if is_dead(pool):
        flags.add("dead_draft")
    rates = pool.per_position
    if rates and pool.drafts >= MIN_DRAFTS_FOR_SHAPE:
        if is_step(rates):
            flags.add("synthetic_suspected")
        elif is_cut_off(pool, rates):
            flags.add("k_exceeds_block")
    if len(pool.ks) > 1:
        flags.add("k_varies")
    if pool.estimated:
        flags.add("drafts_estimated")
    if pool.unknown:
        flags.add("drafts_unknown")
    return sorted(flags)


def is_synthetic_config(config: dict[str, object]) -> bool:
    """Whether the speculative configuration chooses the acceptance (vLLM 0.33.0, config/speculative.py)."""
    return config.get("rejection_sample_method") == "synthetic" or "synthetic_acceptance" in config


def is_dead(pool: Pool) -> bool:
    """Whether the acceptance length prints as 1.00 with at least a thousand tokens drafted."""
    drafted = pool.drafted or pool.drafts * (pool.k or 1)
    if drafted < MIN_DRAFTED_FOR_DEAD:
        return False
    length = pool.acceptance_length
    return pool.accepted < 0.005 * drafted if length is None else length < 1.005


def is_step(rates: Sequence[float]) -> bool:
    """Whether the rates are ones, at most one fraction, then zeros, with at least one 1 and one other.

    That is the schedule vLLM makes from `synthetic_acceptance_length` (0.33.0, config/speculative.py,
    `_acceptance_length_to_rates`); a draft that is simply never rejected has no other.
    """
    ones = sum(1 for rate in rates if rate >= 0.9995)
    rest = rates[ones:]
    return 0 < ones < len(rates) and rest[0] < 0.95 and all(rate == 0 for rate in rest[1:])


def is_cut_off(pool: Pool, rates: Sequence[float]) -> bool:
    """Whether acceptance stops dead after a position that was accepted often, with tokens drafted beyond it."""
    used = sum(1 for rate in rates if rate > 0)
    if not 0 < used < len(rates) or pool.position_accepted[used - 1] < MIN_DRAFTS_FOR_SHAPE:
        return False
    before = rates[used - 2] if used > 1 else 1.0
    drafted_beyond = not pool.drafted_known or pool.drafted / pool.drafts > used + 0.5
    return rates[used - 1] / before > 0.1 and drafted_beyond
