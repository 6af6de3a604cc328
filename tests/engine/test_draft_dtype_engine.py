"""A BF16 draft beside an FP16 target in a real engine: cast to FP16 nothing of it is accepted, in its own dtype all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafttools import attest
from tests.engine import harness
from tests.engine.harness import Served

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS = 2
BEYOND_FP16 = 2.0**24  # what FP16 has neither above 1 nor below it
BF16, FP16 = "bfloat16", "float16"


def write(directory: Path) -> None:
    """A target, and a draft that computes the same from weights that only BF16 can hold."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.engine import tiny_checkpoints

    torch.manual_seed(0)
    config = Qwen3Config(num_hidden_layers=LAYERS, **tiny_checkpoints.SMALL)
    weights = Qwen3ForCausalLM(config).to(torch.bfloat16).state_dict()
    for name in weights:
        if "proj" in name:
            weights[name] *= 6  # else the layers hardly matter beside the embedding
    target = {name: weight.to(torch.float16) for name, weight in weights.items()}
    for name in weights:
        if "up_proj" in name:
            weights[name] /= BEYOND_FP16
        if "down_proj" in name:
            weights[name] *= BEYOND_FP16
    for name, tensors, dtype in (("target", target, FP16), ("draft", weights, BF16)):
        changes: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": dtype, "dtype": dtype}
        tiny_checkpoints.save(directory / name, tensors, config, **changes)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    root = tmp_path_factory.mktemp("draft_dtype")
    write(root)
    draft = {"method": "draft_model", "model": str(root / "draft"), "num_speculative_tokens": 2}
    options = {"model": str(root / "target"), "speculative_config": draft, "enforce_eager": True}
    arms = {"stock": (), "shim": ("--import-drafttools",)}
    return {arm: harness.engine(root / arm, options, target_layers=LAYERS, flags=flags) for arm, flags in arms.items()}


def accepted(run: Served) -> float:
    """Share of the proposed tokens that the target took."""
    proposed = run.metrics["vllm:spec_decode_num_draft_tokens"]
    return run.metrics["vllm:spec_decode_num_accepted_tokens"] / proposed


def test_stock_casts_the_draft_and_loses_it(served: dict[str, Served]) -> None:
    assert accepted(served["stock"]) < 0.1


def test_the_draft_keeps_its_dtype_and_is_accepted(served: dict[str, Served]) -> None:
    assert accepted(served["shim"]) > 0.8


def test_the_target_says_the_same(served: dict[str, Served]) -> None:
    assert served["shim"].tokens == served["stock"].tokens
    assert len({token for output in served["stock"].tokens for token in output}) > 4, "a target that repeats itself"


def test_the_report_tells(served: dict[str, Served]) -> None:
    code, text = harness.status(served["shim"].reports)
    assert code == 0, text
    reports = attest.read(served["shim"].reports)
    assert [set(draft["dtypes"]) for report in reports for draft in report["drafts"]] == [{BF16}]
    assert any("the draft keeps bfloat16 beside a float16 target" in note for r in reports for note in r["notes"])
