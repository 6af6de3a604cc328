"""Serve the experiment's prompts once, in this process's environment, and write what vLLM counted.

python -m tests.engine.effect.serve TARGET DRAFT OUT_FILE
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import torch

from tests.engine.effect.language import Language

REQUESTS = 192
PROMPT_TOKENS = 8
OUTPUT_TOKENS = 48
SPECULATIVE_TOKENS = 3


def prompts() -> list[dict[str, list[int]]]:
    """The same prompts in every arm, from a seed that training does not use."""
    sequences = Language().sample(REQUESTS, PROMPT_TOKENS, torch.Generator().manual_seed(4242))
    return [{"prompt_token_ids": sequence} for sequence in sequences.tolist()]


def engine(target: str, draft: str) -> Any:
    from vllm import LLM

    return LLM(
        model=target,
        speculative_config={
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": SPECULATIVE_TOKENS,
            "draft_tensor_parallel_size": 2,
        },
        tensor_parallel_size=2,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2 * (PROMPT_TOKENS + OUTPUT_TOKENS),
        max_num_seqs=REQUESTS,
        disable_log_stats=False,
        per_request_spec_decode_metrics="summary",
    )


def request(output: Any) -> dict[str, Any]:
    """One request's verify steps (``drafts``), accepted draft tokens and output tokens."""
    completion = output.outputs[0]
    histogram = completion.spec_decode_metrics.histogram
    return {
        "drafts": sum(histogram),
        "accepted": sum(accepted * steps for accepted, steps in enumerate(histogram)),
        "tokens": list(completion.token_ids),
    }


def main() -> None:
    from vllm import SamplingParams

    target, draft, out = sys.argv[1:]
    llm = engine(target, draft)
    start = time.monotonic()
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts(), greedy, use_tqdm=False)
    seconds = time.monotonic() - start
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    pathlib.Path(out).write_text(
        json.dumps(
            {
                "drafts": counters["vllm:spec_decode_num_drafts"],
                "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
                "seconds": seconds,
                "requests": [request(output) for output in outputs],
            }
        )
    )


if __name__ == "__main__":
    main()
