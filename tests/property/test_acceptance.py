"""What never changes the pooled numbers, and what vLLM's own logger prints comes back."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafttools.acceptance.drafts import count_drafts
from drafttools.acceptance.logs import read_log
from drafttools.acceptance.metrics import parse_scrape, read_scrapes
from drafttools.acceptance.records import Pool, Rules, Run
from drafttools.acceptance.sources import read
from drafttools.acceptance.summary import figures, summarize
from drafttools.errors import DraftToolsError

NOISE = st.sampled_from(
    [
        "INFO Engine 000: Avg prompt throughput: 12.0 tokens/s, Running: 4 reqs",
        'INFO:     127.0.0.1:51234 - "POST /v1/completions HTTP/1.1" 200 OK',
        "INFO DiffusionDecoding metrics: Committed token throughput: 2.00 tokens/s, Committed: 20 tokens",
        "SpecDecoding metrics: Mean acceptance length: 2.0",
        "\x1b[31mERROR\x1b[0m naïve",
        "",
    ]
)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """Drafts, and accepted tokens per position at k = 3."""
    drafts = draw(st.integers(1, 4000))
    counts = sorted((draw(st.integers(0, drafts)) for _ in range(3)), reverse=True)
    return drafts, tuple(counts)


def line(drafts: int, counts: tuple[int, ...], pid: int = 1) -> str:
    accepted, drafted = sum(counts), drafts * len(counts)
    rates = ", ".join(f"{count / drafts:.3f}" for count in counts)
    return (
        f"(APIServer pid={pid}) INFO SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: 0.10 tokens/s, Drafted throughput: 0.20 tokens/s, Accepted: {accepted} tokens, Drafted: "
        f"{drafted} tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: 1.0%"
    )


LINES = st.lists(st.one_of(intervals().map(lambda interval: line(*interval)), NOISE), max_size=12)


def read_text(text: str, chunk_bytes: int = 1 << 20, **rules: Any) -> Run:
    run = Run("log")
    read_log(io.BytesIO(text.encode()), run, Rules(**rules), chunk_bytes=chunk_bytes)
    return run


def pooled(run: Run) -> dict[str, Any]:
    return {**figures(run.pool), "empty": run.pool.empty, "intervals": run.pool.intervals, "skipped": run.skipped}


@given(LINES, st.integers(1, 300), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=60, deadline=None)
def test_reading_in_pieces_of_any_size(lines: list[str], chunk_bytes: int, end: str) -> None:
    text = end.join(lines)
    whole, pieces = read_text(text), read_text(text, chunk_bytes)
    assert summarize(pieces) == summarize(whole)


@given(LINES, st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_splitting_a_log_between_lines(lines: list[str], cut: int) -> None:
    parts = [read_text("\n".join(part)) for part in (lines[:cut], lines[cut:])]
    pool = Pool()
    for part in parts:
        pool.merge(part.pool)
    whole = read_text("\n".join(lines))
    assert figures(pool) == figures(whole.pool)
    assert sum(part.skipped for part in parts) == whole.skipped


@given(LINES, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_engines_interleaved_in_any_order(lines: list[str], rng: random.Random) -> None:
    shuffled = rng.sample(lines, len(lines))
    assert pooled(read_text("\n".join(shuffled))) == pooled(read_text("\n".join(lines)))


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100)), max_size=6), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_cumulative_engines_interleaved(engines: list[list[tuple[int, int]]], rng: random.Random) -> None:
    """V0 lines count since the start, each process for itself; the last line of each says it all."""
    queues, drafts, accepted = [], 0, 0
    for pid, steps in enumerate(engines):
        queue, total_drafts, total_emitted = [], 0, 0
        for more_drafts, more_accepted in steps:
            total_drafts += more_drafts
            total_emitted += more_drafts + min(more_accepted, 2 * more_drafts)
            queue.append(
                f"(Engine pid={pid}) INFO Speculative metrics: Draft acceptance rate: 0.500, System efficiency: 0.500, "
                f"Number of speculative tokens: 2, Number of accepted tokens: 7, Number of draft tokens: "
                f"{2 * total_drafts + 7 * 0}, Number of emitted tokens: {total_emitted}."
            )
        queues.append(queue)
        drafts, accepted = drafts + total_drafts, accepted + total_emitted - total_drafts
    lines = []
    while any(queues):
        lines.append(rng.choice([queue for queue in queues if queue]).pop(0))
    run = read_text("\n".join(lines))
    assert (run.pool.drafts, run.pool.accepted, run.flags) == (drafts, accepted, set())


LABEL_VALUES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)


@given(
    st.lists(st.tuples(LABEL_VALUES, intervals()), min_size=1, max_size=3, unique_by=lambda engine: engine[0]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_labels_and_lines_in_any_order(engines: list[tuple[str, Any]], rng: random.Random) -> None:
    def text(shuffle: bool) -> list[str]:
        lines = []
        for model, (drafts, counts) in engines:
            escaped = model.replace("\\", r"\\").replace('"', r"\"")
            values = [("drafts", drafts, {}), ("accepted_tokens", sum(counts), {}), ("draft_tokens", 3 * drafts, {})]
            values += [("accepted_tokens_per_pos", count, {"position": str(i)}) for i, count in enumerate(counts)]
            for name, value, more in values:
                labels = [f'{key}="{label}"' for key, label in {"model_name": escaped, "engine": "0", **more}.items()]
                if shuffle:
                    rng.shuffle(labels)
                lines.append(f"vllm:spec_decode_num_{name}_total{{{','.join(labels)}}} {float(value)}")
        if shuffle:
            rng.shuffle(lines)
        return lines

    runs = []
    for shuffle in (False, True):
        run = Run("scrape")
        read_scrapes(None, parse_scrape(text(shuffle)), run, Rules())
        runs.append(pooled(run))
    assert runs[0] == runs[1]
    assert runs[0]["drafts"] == sum(drafts for _, (drafts, _) in engines)
    assert runs[0]["accepted"] == sum(sum(counts) for _, (_, counts) in engines)


@given(intervals())
@settings(max_examples=200, deadline=None)
def test_full_steps_are_counted_exactly(interval: tuple[int, tuple[int, ...]]) -> None:
    drafts, counts = interval
    run = read_text(line(drafts, counts))
    assert run.pool.drafts == drafts
    assert not run.pool.estimated
    if drafts < 1000:
        assert run.pool.position_accepted == list(counts)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=200),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_short_steps_are_counted_to_the_printed_digit(
    steps: list[tuple[int, int]], with_rates: bool, with_bonus: bool
) -> None:
    steps = [(drafted, min(drafted, accepted)) for drafted, accepted in steps]
    drafted, accepted = (sum(column) for column in zip(*steps, strict=True))
    if not drafted:
        return
    true_length = 1 + accepted / len(steps)
    rates = [float(f"{sum(a > i for _, a in steps) / len(steps):.3f}") for i in range(5)] if with_rates else []
    printed = float(f"{true_length - (not with_bonus and with_rates):.2f}")
    count = count_drafts(accepted, drafted, 5, printed, rates)
    assert count.drafts is not None
    if accepted and not (printed == 1.0 and with_bonus):
        assert 1 + accepted / count.drafts == pytest.approx(true_length, abs=0.0101)


@given(
    st.binary(max_size=2000), st.sampled_from([b"", b"# HELP x\n", b'{"choices": ', b"\x1f\x8b\x08", b"[{", b"<html"])
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path: Path, content: bytes, start: bytes) -> None:
    path = tmp_path / "input"
    path.write_bytes(start + content)
    try:
        run = read(str(path), Rules())
    except DraftToolsError as error:
        lines = str(error).splitlines()
    else:
        lines = json.dumps(summarize(run), allow_nan=False).splitlines()
    assert len(lines) == 1


@pytest.mark.vllm
@given(
    st.integers(1, 7),
    st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=40), max_size=8),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_line_of_vllms_own_logger_comes_back(k: int, steps: list[list[tuple[int, int]]], full: bool) -> None:
    metrics = pytest.importorskip("vllm.v1.spec_decode.metrics")
    logging, printed = metrics.SpecDecodingLogging(), []
    drafts = drafted = accepted = 0
    per_position = [0] * k
    for step in steps:
        stats = metrics.SpecDecodingStats.new(k)
        for proposed, taken in step:
            proposed = k if full else min(k, proposed)
            taken = min(proposed, taken)
            stats.observe_draft(num_draft_tokens=proposed, num_accepted_tokens=taken)
            drafts, drafted, accepted = drafts + 1, drafted + proposed, accepted + taken
            per_position = [count + (taken > i) for i, count in enumerate(per_position)]
        logging.observe(stats)
    logging.log(log_fn=lambda message, *values: printed.append(message % values))
    run = read_text("\n".join(printed))
    assert run.skipped == 0
    assert len(printed) == bool(drafts)
    if not drafted:
        assert run.pool.empty == len(printed)
        return
    assert (run.pool.accepted, run.pool.drafted, run.pool.k) == (accepted, drafted, k)
    if full:
        assert (run.pool.drafts, run.pool.position_accepted) == (drafts, per_position)
    elif accepted >= 0.005 * drafts:
        assert run.pool.acceptance_length == pytest.approx(1 + accepted / drafts, abs=0.0101)
