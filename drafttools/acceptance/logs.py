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
_ACCEPTED = re.compile(rb"(?:Accepted: (\d{1,18}) tokens|Number of accepted tokens: (\d{1,18}),)")
_DRAFTED = re.compile(rb"(?:Drafted: (\d{1,18}) tokens|Number of draft tokens(?: tokens)?: (\d{1,18})[,.])")
_EMITTED = re.compile(rb"Number of emitted tokens(?: tokens)?: (\d{1,18})\.")
_K = re.compile(rb"Number of speculative tokens: (\d{1,4}),")
_LENGTH = re.compile(rb"Mean acceptance length: (\d{1,6}\.\d\d),")
_POSITIONS = re.compile(rb"Per-position acceptance rate: (\d\.\d{3}(?:, \d\.\d{3})*)")
_END = re.compile(rb"Avg Draft acceptance rate: [\d.na]+%", re.IGNORECASE)


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
        start, end = _line_around(text, place)
        if merge_config(self.run.config, read_config_line(text[start:end])):
            self.run.flags.add("config_varies")

    def _read_record(self, text: bytes, place: int, next_place: int) -> None:
        start, end = _line_around(text, place)
        label = text[max(0, place - 40) : place]
        if not label.endswith((b"SpecDecoding metrics: ", b"Speculative metrics: ")):
            return
        self.run.speculation = True
        record = text[place : min(end, max(place, next_place))]
        if b"\x1b" in record:
            record = _ANSI.sub(b"", record)
        sample = self._sample(record, text[start:place])
        if sample is None:
            self.run.skipped += 1
        else:
            self.run.take(sample, self.rules)

    def _sample(self, record: bytes, prefix: bytes) -> Sample | None:
        accepted_match, drafted_match = _ACCEPTED.search(record), _DRAFTED.search(record)
        if not accepted_match or not drafted_match:
            return None
        accepted = int(accepted_match[1] or accepted_match[2])
        drafted = int(drafted_match[1] or drafted_match[2])
        cut = record.startswith(b"Mean acceptance length") and not _END.search(record)
        if cut or accepted > drafted:
            return None
        where = f"line {self.lines + 1}"
        k_match = _K.search(record)
        k = int(k_match[1]) if k_match else self.rules.k or self.run.config.get("k")
        emitted = _EMITTED.search(record)
        if emitted and b"System efficiency: nan" not in record:
            return self._since_last(prefix, int(emitted[1]), drafted, k, where)
        if not drafted:
            return Sample(where, 0, 0, 0)
        length_match, positions_match = _LENGTH.search(record), _POSITIONS.search(record)
        length = float(length_match[1]) if length_match else None
        rates = [float(rate) for rate in positions_match[1].split(b", ")] if positions_match else []
        if any(rate > 1 for rate in rates):
            return None
        count = count_drafts(accepted, drafted, k, length, rates)
        positions = position_counts(count.drafts, rates) if rates and count.drafts else None
        return Sample(where, accepted, drafted, count.drafts, count.k, positions, count.exact)

    def _since_last(self, prefix: bytes, emitted: int, drafted: int, k: int | None, where: str) -> Sample | None:
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
        return Sample(where, accepted, now.drafted - before.drafted, drafts, k)


def _line_around(text: bytes, place: int) -> tuple[int, int]:
    start = text.rfind(b"\n", 0, place) + 1
    start = max(start, text.rfind(b"\r", start, place) + 1)
    end = _LINE_END.search(text, place)
    return start, end.start() if end else len(text)
