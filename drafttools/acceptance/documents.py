"""JSON documents: `vllm bench serve` results and responses that carry per-request acceptance.

- `vllm bench serve --save-result` (vLLM 0.33.0, benchmarks/serve.py): keys `spec_decode_*`.
- `metrics.speculative_decoding` of a response (0.33.0, entrypoints/generate/base/protocol.py): an acceptance histogram.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from drafttools.acceptance.drafts import position_counts
from drafttools.acceptance.records import Rules, Run, Sample
from drafttools.errors import DraftToolsError

MAX_DOCUMENT_BYTES = 512 << 20
# Any of these in the first bytes of a JSON file makes it one of ours rather than a JSON log.
MARKS = tuple(
    f'"{key}'.encode()
    for key in ("speculative_decoding", "spec_decode_", "request_throughput", "acceptance_histogram", "choices")
)


def read_documents(stream: BinaryIO, run: Run, rules: Rules) -> None:
    """Read one JSON document, or one a line (`--append-result`, collected responses, server-sent events).

    Raises:
        DraftToolsError: nothing in the file is JSON, or one document is larger than 512 MiB.
    """
    run.speculation = None
    documents = 0
    for document in _documents(stream, run):
        documents += 1
        for place, found in _walk(document):
            _take(found, f"document {documents}{place}", run, rules)
    if not documents:
        raise DraftToolsError(f"{run.source}: not readable as JSON; give a whole result or response file")


def _documents(stream: BinaryIO, run: Run) -> Iterator[Any]:
    text = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(text) > MAX_DOCUMENT_BYTES:
        raise DraftToolsError(f"{run.source}: larger than 512 MiB; split it by line")
    try:
        yield json.loads(text)
        return
    except (ValueError, RecursionError):
        pass
    for line in text.splitlines():
        line = line.strip().removeprefix(b"data: ")
        if not line or line == b"[DONE]":
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            run.skipped += 1


def _walk(node: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every dictionary in a document that holds acceptance figures, with its place."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _walk(item, f"{place}[{index}]")
    elif isinstance(node, dict):
        if "spec_decode_num_drafts" in node or "acceptance_histogram" in node:
            yield place, node
        for key in ("metrics", "speculative_decoding", "choices", "results"):
            if key in node:
                yield from _walk(node[key], f"{place}.{key}")


def _take(found: dict[str, Any], where: str, run: Run, rules: Rules) -> None:
    try:
        sample = _bench(found, where) if "spec_decode_num_drafts" in found else _request(found, where)
    except (KeyError, TypeError, ValueError):
        run.skipped += 1
        return
    run.take(sample, rules)


def _bench(found: dict[str, Any], where: str) -> Sample:
    drafts, accepted = int(found["spec_decode_num_drafts"]), int(found["spec_decode_accepted_tokens"])
    rates = [float(rate) for rate in found.get("spec_decode_per_position_acceptance_rates") or []]
    positions = position_counts(drafts, rates) if rates else None
    return Sample(where, accepted, int(found["spec_decode_draft_tokens"]), drafts, len(rates) or None, positions)


def _request(found: dict[str, Any], where: str) -> Sample:
    histogram = [int(count) for count in found["acceptance_histogram"]]
    positions = tuple(sum(histogram[i:]) for i in range(1, len(histogram)))
    k = int(found.get("num_spec_tokens", len(positions)))
    return Sample(where, sum(positions), int(found["num_draft_tokens"]), sum(histogram), k, positions)
