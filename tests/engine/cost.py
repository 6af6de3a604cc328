"""Tokens per second of a CPU engine with and without the shim, in alternating runs.

    python -m tests.engine.cost [PAIRS]

Prints each run's best round and the ratio of each pair. A round serves the harness's prompts once; the best of many is
least disturbed by whatever else the machine does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch

from tests.engine import harness, tiny_checkpoints

ROUNDS = 30


def best_round(directory: Path, checkpoints: Path, flags: tuple[str, ...]) -> float:
    """Seconds of the fastest round of one engine."""
    config = {"method": "eagle", "model": str(checkpoints / "llama_eagle"), "num_speculative_tokens": 2}
    options = {"model": str(checkpoints / "llama"), "speculative_config": config, "enforce_eager": True}
    return min(harness.engine(directory, options, target_layers=2, flags=(*flags, f"--rounds={ROUNDS}")).round_seconds)


def main(pairs: int) -> None:
    """Run and print."""
    torch.manual_seed(0)
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        tiny_checkpoints.llama(root)
        for i in range(pairs):
            arms = [("stock", ()), ("shim", ("--import-drafttools",))]
            seconds = {name: best_round(root / f"{name}{i}", root, flags) for name, flags in arms[:: 1 - 2 * (i % 2)]}
            ratios.append(seconds["stock"] / seconds["shim"])
            print(f"pair {i}: stock {seconds['stock']:.4f} s, shim {seconds['shim']:.4f} s, ratio {ratios[-1]:.4f}")
    print(f"tokens/s with the shim over without: median {statistics.median(ratios):.4f} of {pairs} pairs")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
