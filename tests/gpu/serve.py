"""Serve one engine on request: a JSON batch on each line of standard input, its answer on a line of standard output.

    python -m tests.gpu.serve '{"model": ..., "speculative_config": {...}, ...}'

The engine stays loaded between requests, so several engines can take turns on one GPU. There is no tokenizer.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

MARK = "ANSWER "
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}


def main() -> None:
    """Build the engine from the JSON arguments of `vllm.LLM`, answer once when it is ready and once a request."""
    from vllm import LLM

    started = time.monotonic()
    llm = LLM(**{**DEFAULTS, **json.loads(sys.argv[1])})
    ready = {"load_s": time.monotonic() - started, "memory": memory(), "probe": probe_counts()}
    answer({**ready, "all_reduces": all_reduces(llm), **versions()})
    for line in sys.stdin:
        answer(generate(llm, json.loads(line)))


def generate(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of `request["prompts"]`, `max_tokens` each, as one batch or `one_by_one`, with what it cost.

    The prompts `language` are those of the trained checkpoints (tests/engine/effect).
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=request["max_tokens"], temperature=0, detokenize=False, ignore_eos=True)
    if request["prompts"] == "language":
        from tests.engine.effect import serve as effect

        prompts = effect.prompts()
    else:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    batches = [[prompt] for prompt in prompts] if request.get("one_by_one") else [prompts]
    before, probed = counters(llm), probe_counts()
    start = time.perf_counter()
    outputs = [output for batch in batches for output in llm.generate(batch, sampling, use_tqdm=False)]
    seconds = time.perf_counter() - start
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "metrics": {name: value - before.get(name, 0) for name, value in counters(llm).items()},
        "probe_before": probed,
        "probe": probe_counts(),
        "all_reduces": all_reduces(llm),
        "requests": [accepted for output in outputs if (accepted := acceptance(output))],
    }


def acceptance(output: Any) -> dict[str, int] | None:
    """Verify steps and accepted draft tokens of one request, where `per_request_spec_decode_metrics` is on."""
    metrics = getattr(output.outputs[0], "spec_decode_metrics", None)
    if metrics is None:
        return None
    return {"drafts": sum(metrics.histogram), "accepted": sum(n * steps for n, steps in enumerate(metrics.histogram))}


def all_reduces(llm: Any) -> list[dict[str, Any]]:
    """Each rank's all-reduces so far; empty without the worker extension that counts them."""
    if not llm.llm_engine.vllm_config.parallel_config.worker_extension_cls:
        return []
    counts: list[dict[str, Any]] = llm.collective_rpc("all_reduces")
    return counts


def counters(llm: Any) -> dict[str, float]:
    """vLLM's speculative decoding counters."""
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {name: value for name, value in values.items() if "spec_decode" in name and value is not None}


def probe_counts() -> dict[str, Any]:
    """What the scope probe counted so far in this process; empty when it is not active or runs in another process."""
    probe = sys.modules.get("scope_probe")
    write = getattr(getattr(probe, "activate", None), "write", None)
    if write is None:
        return {}
    import os

    write()
    counts: dict[str, Any] = json.loads((Path(os.environ["SCOPE_PROBE"]) / f"probe-{os.getpid()}.json").read_text())
    return counts


def memory() -> int | None:
    """Bytes of tensors on the GPU while idle, graphs' pools included; None when the model lives in another process."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def versions() -> dict[str, Any]:
    """The software and the device that this process runs on."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"vllm": vllm.__version__, "torch": torch.__version__, "device": device}


def answer(result: dict[str, Any]) -> None:
    """Print one answer."""
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
