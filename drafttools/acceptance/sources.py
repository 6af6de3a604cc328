"""Open any source by what it holds: plain or gzip, log, Prometheus text, JSON; or a URL."""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from drafttools.acceptance.documents import MARKS, read_documents
from drafttools.acceptance.logs import read_log
from drafttools.acceptance.metrics import Scrape, parse_scrape, read_scrapes, sample_url
from drafttools.acceptance.records import Rules, Run
from drafttools.errors import DraftToolsError

HEAD_BYTES = 1 << 16
BUFFER_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"

_METRIC_LINE = re.compile(
    rb"# (?:HELP|TYPE) |[A-Za-z_:][\w:]*(?:\{.*\})?[ \t]+[-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|NaN|Inf)"
    rb"(?: -?\d+)?\s*(?:\n|\Z)"
)
_JSON_START = re.compile(rb"\s*(?:data: )?(?:\{|\[\s*\{)")
_HTML_START = re.compile(rb"\s*<(?:!doctype|html|head|body)\b", re.IGNORECASE)


def read(source: str, rules: Rules, interval_s: float = 0.0) -> Run:
    """Read one file or URL.

    Args:
        source: a path, or an http(s) URL of a server's metrics.
        rules: exclusions, and k where the source does not tell it.
        interval_s: seconds between the two scrapes of a URL; 0 for one scrape, everything since the start.

    Raises:
        DraftToolsError: the source cannot be opened or is none of the formats.
    """
    run = Run(source)
    if source.startswith(("http://", "https://")):
        sample_url(source, interval_s, run, rules)
        return run
    with _Source(source) as file, _progress(file) as advance:
        kind = file.kind()
        if kind == "metrics":
            read_scrapes(None, _scrape(file), run, rules)
        elif kind == "document":
            read_documents(file.stream, run, rules)
        else:
            read_log(file.stream, run, rules, advance)
        if file.raw.truncated:
            run.flags.add("truncated")
    return run


def read_pair(before: str, after: str, rules: Rules) -> Run:
    """Read what happened between two scrape files; an empty first one means since the start.

    Raises:
        DraftToolsError: a file cannot be opened or is not Prometheus text.
    """
    run = Run(f"{before} .. {after}")
    scrapes = []
    for path in (before, after):
        with _Source(path) as file:
            if file.head().strip() and file.kind() != "metrics":
                raise DraftToolsError(f"{path}: not Prometheus text; give the saved answer of /metrics")
            scrapes.append(_scrape(file))
    read_scrapes(scrapes[0], scrapes[1], run, rules)
    return run


class _Forgiving(io.RawIOBase):
    """The bytes of a file, unpacked if gzip; a damaged end is an end, and noted."""

    def __init__(self, file: io.BufferedReader) -> None:
        packed = file.peek(2)[:2] == GZIP_MAGIC
        # read1 hands over what was unpacked before the damage; read would lose it.
        self.read_some = gzip.GzipFile(fileobj=file).read1 if packed else file.read
        self.truncated = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            data = self.read_some(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.truncated = True
            return 0
        buffer[: len(data)] = data
        return len(data)


class _Source:
    """An open file and what kind it is."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.file = Path(path).open("rb")  # noqa: SIM115, closed by __exit__
        except OSError as error:
            raise DraftToolsError(f"{path}: {error.strerror or error}; give a readable log, scrape or result") from None
        self.size = Path(path).stat().st_size
        self.raw = _Forgiving(self.file)
        self.reader = io.BufferedReader(self.raw, BUFFER_BYTES)
        self.stream = cast(BinaryIO, self.reader)

    def __enter__(self) -> _Source:
        if not self.head() and self.raw.truncated:
            raise DraftToolsError(f"{self.path}: damaged gzip, nothing could be read; copy it again")
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.file.close()

    def head(self) -> bytes:
        return self.reader.peek(HEAD_BYTES)[:HEAD_BYTES]

    def kind(self) -> str:
        """`log`, `metrics` or `document`."""
        head = self.head()
        if _HTML_START.match(head):
            raise DraftToolsError(f"{self.path}: HTML, not a log, metrics or JSON; save the server's own answer")
        if _METRIC_LINE.match(head.lstrip()):
            return "metrics"
        # What starts like JSON without our keys is a log of JSON lines.
        document = _JSON_START.match(head) and any(mark in head for mark in MARKS)
        return "document" if document else "log"


def _scrape(file: _Source) -> Scrape:
    return parse_scrape(io.TextIOWrapper(file.reader, "utf-8", "replace"))


@contextmanager
def _progress(file: _Source) -> Iterator[Callable[[int], None]]:
    """A progress bar over the file's bytes, on a terminal and for a file of known size only."""
    if not sys.stderr.isatty() or not file.file.seekable():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(Path(file.path).name, total=file.size)
        yield lambda _: bar.update(task, completed=file.file.tell())
