"""Serve two batches with one speculative engine whose log and metrics can be read meanwhile.

    python -m tests.engine.acceptance_serve CHECKPOINT DIRECTORY

The draft is the target itself, so that some tokens are accepted; the second batch is mostly sampled, so that some are
rejected. The log goes to standard output. DIRECTORY/port appears after the first batch; the second follows one line on
standard input, and DIRECTORY/responses.jsonl (per-request figures, as in a server's responses) appears after it.
"""

import json
import sys
from pathlib import Path
from typing import Any


def batch(llm: Any, first_token: int, temperatures: tuple[float, ...]) -> list[dict[str, Any]]:
    """Eight requests at these temperatures in turn; their figures."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [first_token + i, 7, 9 + i]} for i in range(8)]
    sampling = [
        SamplingParams(max_tokens=40 + i, temperature=temperature, seed=i, detokenize=False, ignore_eos=True)
        for i, temperature in enumerate(temperatures * (8 // len(temperatures)))
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    llm.llm_engine.do_log_stats()
    return [{"speculative_decoding": output.outputs[0].spec_decode_metrics.to_dict()} for output in outputs]


def main() -> None:
    from prometheus_client import start_http_server
    from vllm import LLM

    checkpoint, directory = sys.argv[1], Path(sys.argv[2])
    llm = LLM(
        model=checkpoint,
        speculative_config={"method": "draft_model", "model": checkpoint, "num_speculative_tokens": 3},
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        disable_log_stats=False,
        per_request_spec_decode_metrics="summary",
        gpu_memory_utilization=0.2,
    )
    server, _ = start_http_server(0, addr="127.0.0.1")
    responses = batch(llm, 20, (0.0,))
    (directory / "port").write_text(str(server.server_port))
    sys.stdin.readline()
    responses += batch(llm, 120, (0.0, 0.3, 0.6, 0.9))
    (directory / "responses.jsonl").write_text("".join(json.dumps(response) + "\n" for response in responses))
    sys.stdin.readline()


if __name__ == "__main__":
    main()
