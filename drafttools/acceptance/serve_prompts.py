"""One engine, some prompts, one result file: what `drafttools verify` runs twice, each in a process of its own.

    python -m drafttools.acceptance.serve_prompts REQUEST.json RESULT.json

The result has the keys of a `vllm bench serve` result (vLLM 0.33.0, benchmarks/serve.py), so the acceptance readers
read it, and the token ids of every request. vLLM is imported when this runs, never when it is imported.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 8
COUNTERS = {
    "vllm:spec_decode_num_drafts": "spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens": "spec_decode_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "spec_decode_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    """Serve the request and write the result."""
    from vllm import LLM, SamplingParams

    request = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**request["engine"])
    llm.generate(request["prompts"][:1], SamplingParams(**{**request["sampling"], "max_tokens": WARM_UP_TOKENS}))
    before = _counters(llm)
    start = time.perf_counter()
    outputs = llm.generate(request["prompts"], SamplingParams(**request["sampling"]))
    seconds = time.perf_counter() - start
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    result = {"token_ids": tokens, "duration": seconds, "output_throughput": sum(map(len, tokens)) / seconds}
    Path(sys.argv[2]).write_text(json.dumps({**result, **_spec_decode(before, _counters(llm))}))


def _counters(llm: Any) -> dict[str, list[int]]:
    """Speculative counters by name; one value, or one a position."""
    return {
        metric.name: list(getattr(metric, "values", None) or [getattr(metric, "value", 0)])
        for metric in llm.get_metrics()
        if metric.name in COUNTERS or metric.name == PER_POSITION
    }


def _spec_decode(before: dict[str, list[int]], after: dict[str, list[int]]) -> dict[str, Any]:
    """What happened in between; empty without speculation or without a draft."""
    change = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after if name in before}
    if not change or not change["vllm:spec_decode_num_drafts"][0]:
        return {}
    drafts = change["vllm:spec_decode_num_drafts"][0]
    result: dict[str, Any] = {key: int(change[name][0]) for name, key in COUNTERS.items()}
    result["spec_decode_per_position_acceptance_rates"] = [count / drafts for count in change[PER_POSITION]]
    return result


if __name__ == "__main__":
    main()
