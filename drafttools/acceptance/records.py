"""What every reader yields and what pooling keeps: samples, pools and runs.

Acceptance length (AL) is 1 + accepted / drafts, with accepted and drafts summed over everything that is pooled
(vLLM 0.33.0, v1/spec_decode/metrics.py, class SpecDecodingProm). Lines are never averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Intervals kept apart for the judge; beyond this, neighbours are merged so that a log of any size fits in memory.
MAX_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """One interval of one source.

    Attributes:
        where: place in the source, e.g. ``line 12``.
        accepted: draft tokens accepted as part of a prefix.
        drafted: draft tokens proposed, or None where the source does not say.
        drafts: verification steps, or None where the source does not tell.
        k: draft tokens a full step proposes, or None.
        positions: accepted tokens at each draft position, or None.
        exact: whether ``drafts`` is a count rather than an estimate from rounded figures.
    """

    where: str
    accepted: int
    drafted: int | None
    drafts: int | None
    k: int | None = None
    positions: tuple[int, ...] | None = None
    exact: bool = True

    @property
    def empty(self) -> bool:
        """No drafting happened in this interval."""
        return not self.accepted and not self.drafted and not self.drafts

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, or None."""
        return 1 + self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A sample left out, and the rule that left it out."""

    source: str
    where: str
    acceptance_length: float | None
    drafts: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Rules:
    """Which samples to leave out as warm-up or drain, and what k is where the source does not say.

    Attributes:
        k: draft tokens a step, used only where the source does not tell.
        skip_first: non-empty intervals dropped from the start of each source.
        exclude_above: intervals with a larger acceptance length are dropped.
    """

    k: int | None = None
    skip_first: int = 0
    exclude_above: float | None = None


@dataclass(slots=True)
class Block:
    """Consecutive intervals pooled together; the unit the judge resamples."""

    drafts: int = 0
    accepted: int = 0
    intervals: int = 0

    def add(self, other: Block) -> None:
        self.drafts += other.drafts
        self.accepted += other.accepted
        self.intervals += other.intervals

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts


@dataclass(slots=True)
class Pool:
    """Sums over samples; order and grouping of the samples do not change them."""

    accepted: int = 0
    drafted: int = 0
    drafted_known: bool = True
    drafts: int = 0
    accepted_with_drafts: int = 0
    intervals: int = 0
    empty: int = 0
    estimated: int = 0
    unknown: int = 0
    ks: set[int] = field(default_factory=set)
    position_accepted: list[int] = field(default_factory=list)
    position_drafts: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    block_span: int = 1

    def add(self, sample: Sample) -> None:
        """Add one sample's counts."""
        if sample.empty:
            self.empty += 1
            return
        self.intervals += 1
        self.accepted += sample.accepted
        if sample.drafted is None:
            self.drafted_known = False
        else:
            self.drafted += sample.drafted
        if sample.k is not None:
            self.ks.add(sample.k)
        if not sample.drafts:
            self.unknown += 1
            return
        self.estimated += not sample.exact
        self.drafts += sample.drafts
        self.accepted_with_drafts += sample.accepted
        if sample.positions:
            self._add_positions(sample.positions, sample.drafts)
        self._add_block(Block(sample.drafts, sample.accepted, 1))

    def _add_positions(self, positions: Sequence[int], drafts: int) -> None:
        missing = len(positions) - len(self.position_accepted)
        self.position_accepted += [0] * missing
        self.position_drafts += [0] * missing
        for index, accepted in enumerate(positions):
            self.position_accepted[index] += accepted
            self.position_drafts[index] += drafts

    def _add_block(self, block: Block) -> None:
        if self.blocks and self.blocks[-1].intervals < self.block_span:
            self.blocks[-1].add(block)
            return
        if len(self.blocks) == MAX_BLOCKS:
            self.blocks = merge_blocks(self.blocks, MAX_BLOCKS // 2)
            self.block_span *= 2
        self.blocks.append(block)

    def merge(self, other: Pool) -> None:
        """Add everything another pool holds."""
        self.accepted += other.accepted
        self.drafted += other.drafted
        self.drafted_known &= other.drafted_known
        self.drafts += other.drafts
        self.accepted_with_drafts += other.accepted_with_drafts
        self.intervals += other.intervals
        self.empty += other.empty
        self.estimated += other.estimated
        self.unknown += other.unknown
        self.ks |= other.ks
        missing = len(other.position_accepted) - len(self.position_accepted)
        self.position_accepted += [0] * missing
        self.position_drafts += [0] * missing
        for index in range(len(other.position_accepted)):
            self.position_accepted[index] += other.position_accepted[index]
            self.position_drafts[index] += other.position_drafts[index]
        for block in other.blocks:
            self._add_block(Block(block.drafts, block.accepted, block.intervals))

    @property
    def k(self) -> int | None:
        """The one k all samples share, else None."""
        return next(iter(self.ks)) if len(self.ks) == 1 else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts over the samples whose drafts are known, or None."""
        return 1 + self.accepted_with_drafts / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens, or None where either is not told."""
        return self.accepted / self.drafted if self.drafted and self.drafted_known else None

    @property
    def per_position(self) -> list[float] | None:
        """Share of drafts whose token at each position was accepted (unconditional), or None."""
        if not self.position_accepted:
            return None
        return [a / d for a, d in zip(self.position_accepted, self.position_drafts, strict=True)]

    @property
    def conditional(self) -> list[float | None] | None:
        """Acceptance at each position given that the one before was accepted; None where none was."""
        rates = self.per_position
        if rates is None:
            return None
        return [rate / before if before else None for rate, before in zip(rates, [1.0, *rates], strict=False)]


def merge_blocks(blocks: Sequence[Block], at_most: int) -> list[Block]:
    """Merge consecutive blocks until at most `at_most` are left, keeping their order."""
    size = max(1, -(-len(blocks) // at_most))
    merged = []
    for start in range(0, len(blocks), size):
        block = Block()
        for part in blocks[start : start + size]:
            block.add(part)
        merged.append(block)
    return merged


@dataclass(slots=True)
class Run:
    """One source, read and pooled.

    Attributes:
        source: file name or URL.
        speculation: whether the source shows speculative decoding; None where it cannot tell.
        pool: the sums over the samples that were kept.
        excluded: the samples that were not, each with its rule.
        skipped: records that looked like acceptance figures and could not be read.
        flags: what a reader of the number must know; see `flags.FLAGS`.
        config: what the source says of the speculative configuration and the sampling.
    """

    source: str
    speculation: bool | None = False
    pool: Pool = field(default_factory=Pool)
    excluded: list[Exclusion] = field(default_factory=list)
    skipped: int = 0
    flags: set[str] = field(default_factory=set)
    config: dict[str, Any] = field(default_factory=dict)

    def take(self, sample: Sample, rules: Rules) -> None:
        """Pool a sample, or list it as excluded where a rule says so."""
        self.speculation = True
        reason = self._why_excluded(sample, rules)
        if reason is None:
            self.pool.add(sample)
        else:
            length = sample.acceptance_length
            self.excluded.append(Exclusion(self.source, sample.where, length, sample.drafts, reason))

    def _why_excluded(self, sample: Sample, rules: Rules) -> str | None:
        if sample.empty:
            return None
        if self.pool.intervals + len(self.excluded) < rules.skip_first:
            return f"one of the first {rules.skip_first}"
        length = sample.acceptance_length
        if rules.exclude_above is not None and length is not None and length > rules.exclude_above:
            return f"acceptance length above {rules.exclude_above:g}"
        return None
