"""Serve a few prompts greedily with one engine in this process's environment, and print the result as one JSON line.

    python -m tests.engine.serve '{"model": ..., "speculative_config": {...}, ...}' [--import-drafttools]

The prompts are fixed and there is no tokenizer. `--children-off` imports drafttools here and leaves the engine's own
processes without it. `--turns` then serves them once more for each line of standard input, and prints the seconds.
"""

import json
import os
import sys
import time
from collections.abc import Callable

MARK = "SERVED "
TURN = "TURN "


def main() -> None:
    """Build the engine from the JSON arguments of `vllm.LLM`, generate, and print tokens and acceptance counters."""
    from vllm import LLM, SamplingParams

    options = {"skip_tokenizer_init": True, "max_model_len": 256, "disable_log_stats": False, "seed": 0}
    llm = LLM(**{**options, **json.loads(sys.argv[1])})
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 250 + 1 for j in range(5 + i)]} for i in range(4)]
    sampling = SamplingParams(max_tokens=24, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    for _ in sys.stdin if "--turns" in sys.argv else ():
        print(TURN, _timed(lambda: llm.generate(prompts, sampling, use_tqdm=False)), flush=True)
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics() if "spec_decode" in m.name}
    completions = [output.outputs[0] for output in outputs]
    served = {
        "tokens": [list(completion.token_ids) for completion in completions],
        # repr keeps every bit of a double
        "logprobs": [[repr(next(iter(p.values())).logprob) for p in c.logprobs] for c in completions],
        "metrics": metrics,
    }
    print(MARK + json.dumps(served), flush=True)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    if {"--import-drafttools", "--children-off"} & set(sys.argv):
        import drafttools  # noqa: F401
    if "--children-off" in sys.argv:
        import vllm  # noqa: F401 - registers the patches here, before the children are told not to

        os.environ["DRAFTTOOLS"] = "off"
    main()
