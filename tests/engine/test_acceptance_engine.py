"""A real engine's log, its /metrics and its per-request figures are three readings of the same numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drafttools.acceptance.records import Rules
from drafttools.acceptance.sources import read, read_pair
from drafttools.acceptance.summary import summarize

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
FIGURES = ("acceptance_length", "acceptance_rate", "k", "drafts", "accepted", "drafted", "per_position", "conditional")


@dataclass
class Engine:
    """What one engine left behind: its log, two saved scrapes, its responses, and what a live URL gave."""

    log: Path
    scrapes: tuple[Path, Path]
    responses: Path
    live: dict[str, Any]


def wait_for(path: Path, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)


def save(url: str, path: Path) -> Path:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        path.write_bytes(response.read())
    return path


def sharpen(weights: Path) -> None:
    """Spread the logits of random weights, so that a draft that copies the target agrees with it when greedy."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": 30 * tensors["lm_head.weight"]}, weights, metadata={"format": "pt"})


def engine_environment() -> dict[str, str]:
    """This process's environment without drafttools in it, set up for a small CPU engine."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("DRAFTTOOLS")},
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process imports vLLM, not two
        "VLLM_LOG_STATS_INTERVAL": "0.5",
    }


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pytest.importorskip("vllm")
    import torch

    from tests.engine import tiny_checkpoints

    directory = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    tiny_checkpoints.qwen3(directory)
    sharpen(directory / "qwen3" / "model.safetensors")
    log = directory / "engine.log"
    command = [sys.executable, "-m", "tests.engine.acceptance_serve", str(directory / "qwen3"), str(directory)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=engine_environment(), stdin=subprocess.PIPE, stdout=out, stderr=out, text=True
        )
        try:
            assert process.stdin
            wait_for(directory / "port", process, log)
            url = f"http://127.0.0.1:{(directory / 'port').read_text()}"
            first = save(url, directory / "first.prom")
            process.stdin.write("\n")
            process.stdin.flush()
            wait_for(directory / "responses.jsonl", process, log)
            second = save(url, directory / "second.prom")
            live = summarize(read(url, Rules()))
        finally:
            process.kill()
            process.wait()
    return Engine(log, (first, second), directory / "responses.jsonl", live)


def figures(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in FIGURES}


def log_summary(engine: Engine) -> dict[str, Any]:
    return summarize(read(str(engine.log), Rules()))


def test_the_engine_speculated(engine: Engine) -> None:
    """Some tokens accepted, some rejected; otherwise agreement would show little."""
    run = log_summary(engine)
    assert run["k"] == 3
    assert run["drafts"] > 200
    assert 0.01 * run["drafted"] < run["accepted"] < 0.99 * run["drafted"]


def test_log_and_metrics_agree_to_the_last_digit(engine: Engine) -> None:
    scrape = summarize(read(str(engine.scrapes[1]), Rules()))
    assert figures(log_summary(engine)) == figures(scrape)


def test_saved_and_live_metrics_agree(engine: Engine) -> None:
    assert figures(engine.live) == figures(summarize(read(str(engine.scrapes[1]), Rules())))


def test_the_second_batch_is_the_difference_of_two_scrapes(engine: Engine) -> None:
    first, second = (summarize(read(str(path), Rules())) for path in engine.scrapes)
    between = summarize(read_pair(*map(str, engine.scrapes), Rules()))
    for name in ("drafts", "accepted", "drafted"):
        assert between[name] == second[name] - first[name] > 0


def test_per_request_figures_sum_to_the_metrics(engine: Engine) -> None:
    requests = summarize(read(str(engine.responses), Rules()))
    assert requests["intervals"] == 16
    assert figures(requests) == figures(summarize(read(str(engine.scrapes[1]), Rules())))


def test_the_log_tells_its_configuration(engine: Engine) -> None:
    config = log_summary(engine)["config"]
    assert (config["k"], config["method"]) == (3, "draft_model")


def test_every_printed_line_comes_back(tmp_path: Path, engine: Engine) -> None:
    """Each line alone gives back every figure it printed."""
    lines = [line for line in engine.log.read_text().splitlines() if "SpecDecoding metrics" in line]
    assert len(lines) >= 2
    printed: Callable[[str, str], str] = lambda pattern, line: re.findall(pattern, line)[0]  # noqa: E731
    for line in lines:
        path = tmp_path / "line.log"
        path.write_text(line)
        run = summarize(read(str(path), Rules()))
        assert run["skipped"] == 0
        assert f"{run['acceptance_length']:.2f}" == printed(r"acceptance length: ([\d.]+)", line)
        assert f"{100 * run['acceptance_rate']:.1f}" == printed(r"Avg Draft acceptance rate: ([\d.]+)%", line)
        assert str(run["accepted"]) == printed(r"Accepted: (\d+)", line)
        assert str(run["drafted"]) == printed(r"Drafted: (\d+)", line)
        rates = ", ".join(f"{rate:.3f}" for rate in run["per_position"])
        assert rates == printed(r"Per-position acceptance rate: ([\d., ]+), Avg", line)


def test_verify_runs_the_engine_without_and_with_the_shim(tmp_path: Path, engine: Engine) -> None:
    """`drafttools verify` on the same checkpoint: equal greedy outputs, the same acceptance, and in effect."""
    checkpoint = str(engine.log.parent / "qwen3")
    speculative = {"method": "draft_model", "model": checkpoint, "num_speculative_tokens": 3}
    arguments = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "gpu_memory_utilization": 0.2,
    }
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [30 + i, 7, 11]}) + "\n" for i in range(4)))
    command = [sys.executable, "-m", "drafttools.cli", "verify", "--json", "--model", checkpoint]
    command += ["--speculative-config", json.dumps(speculative), "--engine-args", json.dumps(arguments)]
    command += ["--prompts", str(prompts), "--max-tokens", "24", "--report", str(tmp_path / "reports")]
    environment = {name: value for name, value in engine_environment().items() if name != "VLLM_PLUGINS"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"]) == (0, [])
    assert found["outputs_compared"]
    assert found["off"]["acceptance"]["acceptance_length"] == found["on"]["acceptance"]["acceptance_length"] > 2
    assert found["status"]["in_effect"]
