"""Prometheus text: one scrape, or the difference of two; from files or from a live server.

Counters as vLLM 0.33.0 exports them (v1/spec_decode/metrics.py, SpecDecodingProm; the Rust front end uses the same
names): `vllm:spec_decode_num_drafts_total`, `..._draft_tokens_total`, `..._accepted_tokens_total` and
`..._accepted_tokens_per_pos_total`, with labels `engine`, `model_name` and, for the last, `position`.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field

from drafttools.acceptance.records import Rules, Run, Sample
from drafttools.errors import DraftToolsError

PREFIX = "vllm:spec_decode_num_"
MAX_SCRAPE_BYTES = 64 << 20
TIMEOUT_S = 10.0


@dataclass(slots=True)
class Counters:
    """The counters of one engine."""

    drafts: int = 0
    drafted: int | None = None
    accepted: int = 0
    positions: dict[int, int] = field(default_factory=dict)

    def values(self) -> dict[str, int]:
        """All counters by name, so that two scrapes can be held against each other."""
        named = {"drafts": self.drafts, "accepted": self.accepted}
        named |= {f"position {position}": count for position, count in self.positions.items()}
        return named if self.drafted is None else {**named, "drafted": self.drafted}


@dataclass(slots=True)
class Scrape:
    """One reading of the counters, by (model, engine); `skipped` counts lines that could not be read."""

    engines: dict[tuple[str, str], Counters] = field(default_factory=dict)
    skipped: int = 0


def parse_scrape(lines: Iterable[str]) -> Scrape:
    """Read the speculative counters out of Prometheus text; everything else is ignored.

    Raises:
        DraftToolsError: prometheus_client is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise DraftToolsError("reading metrics needs prometheus_client: pip install 'drafttools[metrics]'") from None
    scrape = Scrape()
    for line in lines:
        if not line.lstrip().startswith(PREFIX):
            continue
        try:
            for family in text_string_to_metric_families(line.strip() + "\n"):
                for sample in family.samples:
                    _count(scrape, sample.name, sample.labels, sample.value)
        except (ValueError, KeyError, IndexError, OverflowError):
            scrape.skipped += 1
    return scrape


def _count(scrape: Scrape, name: str, labels: dict[str, str], value: float) -> None:
    what = name.removeprefix(PREFIX).removesuffix("_total")
    if what not in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        return  # `_created` timestamps
    count = int(value)
    if count < 0:
        raise ValueError(f"negative counter {name}")
    position = int(labels["position"]) if what == "accepted_tokens_per_pos" else None
    counters = scrape.engines.setdefault((labels.get("model_name", ""), labels.get("engine", "")), Counters())
    if position is not None:
        counters.positions[position] = counters.positions.get(position, 0) + count
    elif what == "drafts":
        counters.drafts += count
    elif what == "draft_tokens":
        counters.drafted = (counters.drafted or 0) + count
    else:
        counters.accepted += count


def read_scrapes(before: Scrape | None, after: Scrape, run: Run, rules: Rules) -> None:
    """Pool what happened between two scrapes, or since the start where there is no first one.

    An engine whose counters fell restarted in between: only what it counted since is used, and the run is flagged.
    """
    run.skipped += after.skipped + (before.skipped if before else 0)
    run.speculation = bool(after.engines)
    total: Counters | None = None
    for engine, now in after.engines.items():
        then = before.engines.get(engine) if before else None
        total = _plus(total, now if then is None else _since(then, now, run))
    if before and set(before.engines) - set(after.engines):
        run.flags.add("engine_missing")
    if total is None:
        return
    k = max(total.positions) + 1 if total.positions else rules.k
    positions = tuple(total.positions.get(i, 0) for i in range(k)) if total.positions and k else None
    run.take(Sample("counters", total.accepted, total.drafted, total.drafts, k, positions), rules)


def _since(then: Counters, now: Counters, run: Run) -> Counters:
    before, after = then.values(), now.values()
    if any(after[name] < value for name, value in before.items() if name in after):
        run.flags.add("counter_reset")
        return now
    return Counters(
        now.drafts - then.drafts,
        None if now.drafted is None else now.drafted - (then.drafted or 0),
        now.accepted - then.accepted,
        {position: count - then.positions.get(position, 0) for position, count in now.positions.items()},
    )


def _plus(total: Counters | None, more: Counters) -> Counters:
    if total is None:
        return more
    drafted = None if total.drafted is None or more.drafted is None else total.drafted + more.drafted
    positions = {
        position: total.positions.get(position, 0) + more.positions.get(position, 0)
        for position in total.positions | more.positions
    }
    return Counters(total.drafts + more.drafts, drafted, total.accepted + more.accepted, positions)


def fetch(url: str) -> Scrape:
    """Scrape a live server once.

    Args:
        url: `http://host:port`, with or without `/metrics`.

    Raises:
        DraftToolsError: no answer, an error status, or an answer that is not Prometheus text.
    """
    try:
        with urllib.request.urlopen(metrics_url(url), timeout=TIMEOUT_S) as response:
            kind = response.headers.get_content_type()
            body = response.read(MAX_SCRAPE_BYTES)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise DraftToolsError(f"{url}: no metrics ({error}); is the server up and the address its own?") from None
    text = body.decode("utf-8", "replace")
    if kind == "text/html" or text.lstrip()[:1] == "<":
        raise DraftToolsError(f"{url}: answers HTML, not Prometheus text; give the server's /metrics address")
    return parse_scrape(text.splitlines())


def metrics_url(url: str) -> str:
    """The address with `/metrics` where it names no path."""
    return url if url.split("://", 1)[1].strip("/").count("/") else url.rstrip("/") + "/metrics"


def sample_url(url: str, interval_s: float, run: Run, rules: Rules) -> None:
    """Pool what a live server does over an interval in seconds; 0 takes everything since its start."""
    before = fetch(url) if interval_s > 0 else None
    time.sleep(interval_s)
    read_scrapes(before, fetch(url), run, rules)
