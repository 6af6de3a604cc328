"""The dtype of a draft with a checkpoint of its own: the decision, and vLLM's real speculative configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafttools.dtypes import decide, declared
from drafttools.errors import DraftToolsError
from tests.processes import VllmProcess


@pytest.mark.parametrize(
    ("own", "target", "runs", "method", "outcome"),
    [
        ("bfloat16", "float16", "float16", "draft_model", "keep"),
        ("bfloat16", None, "float16", "draft_model", "keep"),
        ("bfloat16", "float16", "float16", "eagle3", "stop"),
        ("bfloat16", "bfloat16", "float16", "draft_model", "note"),  # --dtype float16: the user's word
        ("bfloat16", "bfloat16", "float16", "eagle", "note"),
        ("bfloat16", "float16", "bfloat16", "eagle", ""),
        ("float16", "float16", "float16", "draft_model", ""),
        ("float16", "bfloat16", "bfloat16", "draft_model", ""),
        (None, "float16", "float16", "eagle", ""),
    ],
)
def test_decision(own: str | None, target: str | None, runs: str, method: str, outcome: str) -> None:
    decision = decide(own, target, runs, method)
    assert {name for name in ("keep", "stop", "note") if getattr(decision, name)} == ({outcome} - {""})
    assert decision.keep in (None, "bfloat16")


def test_declared() -> None:
    assert declared({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert declared({"dtype": "float16", "text_config": {"num_hidden_layers": 1, "dtype": "bfloat16"}}) == "bfloat16"
    assert declared({"dtype": "torch.float16", "text_config": {"num_hidden_layers": 1}}) == "float16"
    assert declared({}) is None


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def speculate(target: str, draft: str, method: str, dtype: str) -> dict[str, Any]:
    """Make vLLM's own SpeculativeConfig from two config.json files; no weights are needed for it."""
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.config.speculative import SpeculativeConfig

    from drafttools import attest

    model = ModelConfig(model=target, skip_tokenizer_init=True, dtype=dtype, max_model_len=256)
    try:
        made = SpeculativeConfig(
            model=draft,
            method=method,
            num_speculative_tokens=1,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    except DraftToolsError as error:
        return {"stopped": str(error)}
    hashes = [made.compute_hash()]
    kept, made.draft_model_config.dtype = made.draft_model_config.dtype, model.dtype
    hashes.append(made.compute_hash())
    return {"dtype": str(kept), "target": str(model.dtype), "hashed": hashes[0] != hashes[1], "notes": attest._notes}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """A target that ships in FP16 and a draft that ships in BF16."""
    for name, dtype in (("target", "float16"), ("draft", "bfloat16")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": dtype}))
    return str(tmp_path / "target"), str(tmp_path / "draft")


@pytest.mark.vllm
def test_draft_model_keeps_its_dtype(pair: tuple[str, str], installed_vllm: VllmProcess) -> None:
    stock = installed_vllm.call(speculate, *pair, "draft_model", "auto", mode="off")
    assert stock["dtype"] == stock["target"] == "torch.float16"
    ours = installed_vllm.call(speculate, *pair, "draft_model", "auto")
    assert (ours["dtype"], ours["target"], ours["hashed"]) == ("torch.bfloat16", "torch.float16", True)
    assert ours["notes"] == ["the draft keeps bfloat16 beside a float16 target"]
    observed = installed_vllm.call(speculate, *pair, "draft_model", "auto", mode="observe")
    assert observed["dtype"] == "torch.float16"


@pytest.mark.vllm
def test_hidden_state_method_stops(pair: tuple[str, str], installed_vllm: VllmProcess) -> None:
    stopped = installed_vllm.call(speculate, *pair, "eagle", "auto")["stopped"]
    for words in (pair[1], "eagle method feeds it the target's float16", "--dtype bfloat16"):
        assert words in stopped
    allowed = installed_vllm.call(speculate, *pair, "eagle", "auto", DRAFTTOOLS_ALLOW_UNVERIFIED="1")
    assert allowed["dtype"] == "torch.float16"
    assert any("it runs in float16" in note for note in allowed["notes"])


@pytest.mark.vllm
def test_explicit_dtype_wins(pair: tuple[str, str], installed_vllm: VllmProcess) -> None:
    """--dtype float16 for a BF16 target: draft and target go along, and the report says so."""
    explicit = installed_vllm.call(speculate, pair[1], pair[1] + "/.", "draft_model", "float16")
    assert explicit["dtype"] == "torch.float16"
    assert any("as --dtype asks" in note for note in explicit["notes"])
