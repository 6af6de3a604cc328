"""vLLM server logs of every format since V0, read as bytes in chunks.

Formats and where they are written:
- V0: `Speculative metrics: ... Number of emitted tokens: N.`, cumulative since the start (spec_decode/metrics.py of
  those releases). Its "accepted" also counts tokens after a rejection, so accepted prefixes are emitted - drafts.
- the first V1 releases: `Speculative metrics:` or `SpecDecoding metrics: Draft acceptance rate: ...`, per interval.
- V1 since: `SpecDecoding metrics: Mean acceptance length: ...` (0.33.0, v1/spec_decode/metrics.py), and the same from
  the Rust front end, where the per-position rates may be missing (0.33.0, rust/src/llm/src/log_stats.rs).
- `DiffusionDecoding metrics:` shares the counters but has no acceptance length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from drafttools.acceptance.config_lines import merge_config, read_config_line
from drafttools.acceptance.drafts import count_drafts, position_counts
from drafttools.acceptance.records import Rules, Run, Sample

CHUNK_BYTES = 1 << 22
# A log line is shorter than this; a longer stretch without a line end is binary and is cut.
MAX_LINE_BYTES = 1 << 20

# One regex a literal: each scans at memory speed, an alternation at a thirtieth of it.
_METRICS = re.compile(rb" metrics: ")
_CONFIG = (re.compile(rb"speculative[_-]config"), re.compile(rb"SamplingParams\("))
_LINE_END = re.compile(rb"[\r\n]")
_ANSI = re.compile(rb"\x1b\[[0-9;]*m")
_PID = re.compile(rb"pid=(\d+)")

# Each number must be followed by what follows it in vLLM's format, so that a cut line is never read as a small number.
_COUNTS = re.compile(rb"Accepted: (\d{1,18}) tokens, Drafted: (\d{1,18}) tokens")
_OLD_COUNTS = re.compile(rb"accepted tokens: (\d{1,18}), Number of draft tokens(?: tokens)?: (\d{1,18})[,.]")
_EMITTED = re.compile(rb"Number of emitted tokens(?: tokens)?: (\d{1,18})\.")
_K = re.compile(rb"Number of speculative tokens: (\d{1,4}),")
_LENGTH = re.compile(rb"Mean acceptance length: (\d{1,6}\.\d\d),")
_POSITIONS = re.compile(rb"Per-position acceptance rate: (\d\.\d{3}(?:, \d\.\d{3})*)")
_END = re.compile(rb"Avg Draft acceptance rate: [\d.na]+%", re.IGNORECASE)

# Requests mostly repeat the same sampling parameters; these many beginnings of them are remembered.
MAX_SEEN = 1024
SEEN_BYTES = 240


class _Counters(NamedTuple):
    """V0's cumulative figures."""

    drafts: int
    emitted: int
    drafted: int


def read_log(
    stream: BinaryIO,
    run: Run,
    rules: Rules,
    advance: Callable[[int], None] = lambda _: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Read a log into `run`, in memory bounded by the chunk.

    Args:
        stream: the log's bytes.
        run: takes the samples, the configuration, the count of unreadable records.
        rules: exclusions, and k for lines that do not tell it.
        advance: called with the number of bytes read, for a progress bar.
        chunk_bytes: bytes a read.
    """
    reader = _LogReader(run, rules)
    for text in _line_blocks(stream, advance, chunk_bytes):
        reader.scan(text)


def _line_blocks(stream: BinaryIO, advance: Callable[[int], None], chunk_bytes: int) -> Iterator[bytes]:
    """Blocks of whole lines."""
    rest = b""
    while chunk := stream.read(chunk_bytes):
        advance(len(chunk))
        end = chunk.rfind(b"\n") + 1
        if not end and len(rest) + len(chunk) < MAX_LINE_BYTES:
            rest += chunk
            continue
        end = end or len(chunk)
        yield rest + chunk[:end]
        rest = chunk[end:]
    if rest:
        yield rest


class _LogReader:
    def __init__(self, run: Run, rules: Rules) -> None:
        self.run = run
        self.rules = rules
        self.lines = 0
        self.cumulative: dict[bytes, _Counters] = {}
        self.seen: set[bytes] = set()

    def scan(self, text: bytes) -> None:
        """Find records and configuration lines in a block of whole lines, in their order."""
        places = [(match.end(), True) for match in _METRICS.finditer(text)]
        places += [(match.start(), False) for pattern in _CONFIG for match in pattern.finditer(text)]
        places.sort()
        counted = 0
        for index, (place, is_record) in enumerate(places):
            self.lines += text.count(b"\n", counted, place)
            counted = place
            if not is_record:
                self._read_config(text, place)
                continue
            next_place = places[index + 1][0] if index + 1 < len(places) else len(text)
            self._read_record(text, place, next_place)
        self.lines += text.count(b"\n", counted)

    def _read_config(self, text: bytes, place: int) -> None:
        beginning = text[place : place + SEEN_BYTES]
        if beginning in self.seen:
            return
        if len(self.seen) < MAX_SEEN:
            self.seen.add(beginning)
        start, end = _line_around(text, place)
        if merge_config(self.run.config, read_config_line(text[start:end])):
            self.run.flags.add("config_varies")

    def _read_record(self, text: bytes, place: int, next_place: int) -> None:
        if not text.endswith((b"SpecDecoding metrics: ", b"Speculative metrics: "), max(0, place - 40), place):
            return
        self.run.speculation = True
        start, end = _line_around(text, place)
        record = text[place : min(end, next_place)]
        if b"\x1b" in record:
            record = _ANSI.sub(b"", record)
        sample = self._sample_of_v0(record, text[start:place]) if b"Number of" in record else self._sample(record)
        if sample is None:
            self.run.skipped += 1
        else:
            self.run.take(sample, self.rules)

    def _k(self) -> int | None:
        """k for records that do not tell it."""
        return self.rules.k or self.run.config.get("k")

    def _sample(self, record: bytes) -> Sample | None:
        counts = _COUNTS.search(record)
        if not counts or (record.startswith(b"Mean acceptance length") and not _END.search(record)):
            return None
        length, positions = _LENGTH.search(record), _POSITIONS.search(record)
        rates = [float(rate) for rate in positions[1].split(b", ")] if positions else []
        return self._interval(int(counts[1]), int(counts[2]), self._k(), float(length[1]) if length else None, rates)

    def _interval(
        self, accepted: int, drafted: int, k: int | None, length: float | None, rates: list[float]
    ) -> Sample | None:
        where = f"line {self.lines + 1}"
        if accepted > drafted or any(rate > 1 for rate in rates):
            return None
        if not drafted:
            return Sample(where, 0, 0, 0)
        count = count_drafts(accepted, drafted, k, length, rates)
        positions = position_counts(count.drafts, rates) if rates and count.drafts else None
        return Sample(where, accepted, drafted, count.drafts, count.k, positions, count.exact)

    def _sample_of_v0(self, record: bytes, prefix: bytes) -> Sample | None:
        counts, emitted, printed_k = _OLD_COUNTS.search(record), _EMITTED.search(record), _K.search(record)
        if not counts:
            return None
        k = int(printed_k[1]) if printed_k else self._k()
        # The first V1 releases kept V0's words but count per interval and print no efficiency.
        if not emitted or b"System efficiency: nan" in record:
            return self._interval(int(counts[1]), int(counts[2]), k, None, [])
        return self._since_last(prefix, int(emitted[1]), int(counts[2]), k)

    def _since_last(self, prefix: bytes, emitted: int, drafted: int, k: int | None) -> Sample | None:
        """The interval between this cumulative line and the last one of the same process."""
        if not k or drafted % k or emitted < drafted // k:
            return None
        pid = _PID.search(prefix)
        tag = pid[1] if pid else b""
        now = _Counters(drafted // k, emitted, drafted)
        before = self.cumulative.get(tag, _Counters(0, 0, 0))
        self.cumulative[tag] = now
        if any(new < old for new, old in zip(now, before, strict=True)):
            self.run.flags.add("counter_reset")
            before = _Counters(0, 0, 0)
        drafts = now.drafts - before.drafts
        accepted = now.emitted - before.emitted - drafts
        if accepted < 0:
            return None
        return Sample(f"line {self.lines + 1}", accepted, now.drafted - before.drafted, drafts, k)


def _line_around(text: bytes, place: int) -> tuple[int, int]:
    start = text.rfind(b"\n", 0, place) + 1
    start = max(start, text.rfind(b"\r", start, place) + 1)
    end = _LINE_END.search(text, place)
    return start, end.start() if end else len(text)
