"""Tokens per second of a CPU engine with and without the shim, from engines that take turns.

    python -m tests.engine.cost [PAIRS_OF_ENGINES] [SIZE ...]

The two engines of a pair stay loaded and serve the same prompts, one at a time, in the order stock, shim, shim, stock,
so both turns meet the same machine; their ratio is the median over the turns. Two processes of one program differ by
chance (where their memory lies), so there are several pairs, and the result is the median over them with its 95 %
bootstrap interval. Of the sizes, `small` has 35 million parameters, fewer than any model that is served; a step of
`tiny` is nearly all Python, where a shim costs the most.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.bootstrap import median_interval
from tests.engine import harness, serve, tiny_checkpoints

WARM_UP = 2
TURNS = {"small": 10, "tiny": 40}  # of each engine, half a minute of either size
SIZES: dict[str, dict[str, int]] = {
    "small": {
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "tiny": {},
}


class Engine:
    """One engine that serves a round whenever asked."""

    def __init__(self, checkpoints: Path, directory: Path, *flags: str) -> None:
        """Start loading it; `directory` takes its reports."""
        config = {"method": "eagle", "model": str(checkpoints / "llama_eagle"), "num_speculative_tokens": 2}
        options = {"model": str(checkpoints / "llama"), "speculative_config": config, "enforce_eager": True}
        command = [sys.executable, "-m", "tests.engine.serve", json.dumps({"gpu_memory_utilization": 0.2, **options})]
        self._process = subprocess.Popen(
            [*command, "--turns", *flags],
            env=harness.environment(
                PYTHONPATH=str(harness.ROOT),
                PYTHONHASHSEED="0",
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                DRAFTTOOLS_REPORT_DIR=str(directory),
            ),
            cwd=harness.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def turn(self) -> float:
        """Seconds of one round."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(serve.TURN):
                return float(line.removeprefix(serve.TURN))
        raise RuntimeError(f"the engine ended with exit status {self._process.wait()}")

    def stop(self) -> None:
        """End it and wait."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def pair(root: Path, number: int, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of each turn of two engines, stock and shim."""
    reports = root / f"shim{number}"
    engines = [Engine(root, root / f"stock{number}"), Engine(root, reports, "--import-drafttools")]
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(WARM_UP + turns):
        for arm in (0, 1) if i % 2 else (1, 0):
            seconds[arm].append(engines[arm].turn())
    for engine in engines:
        engine.stop()
    code, text = harness.status(reports)
    assert code == 0, text
    return seconds[0][WARM_UP:], seconds[1][WARM_UP:]


def measure(size: str, pairs: int) -> None:
    """Print every pair of one size, and their median."""
    torch.manual_seed(0)
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        tiny_checkpoints.llama(Path(scratch), **SIZES[size])
        for number in range(pairs):
            stock, shim = pair(Path(scratch), number, TURNS[size])
            ratios.append(statistics.median(a / b for a, b in zip(stock, shim, strict=True)))
            print(
                f"{size} {number}: stock {statistics.median(stock):.4f} s, shim {statistics.median(shim):.4f} s a turn, "
                f"ratio {ratios[-1]:.4f}, load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    low, high = median_interval(ratios)
    print(
        f"{size}: tokens/s with the shim over without: median {statistics.median(ratios):.4f} [{low:.4f}, {high:.4f}]"
    )


if __name__ == "__main__":
    for chosen in sys.argv[2:] or SIZES:
        measure(chosen, int(sys.argv[1]) if len(sys.argv) > 1 else 8)
