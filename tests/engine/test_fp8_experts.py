"""DeepSeek MTP in a real CPU engine with FP16 and FP8-resident draft experts: the same tokens, other draft bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine import harness

pytestmark = pytest.mark.engine

HIDDEN = 128  # the operator's multiple; tiny_checkpoints makes 64
EXPERTS, WIDTH, DRAFT_LAYER = 4, 32, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token follows from the current one, and an MTP layer that can tell which one."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.engine import tiny_checkpoints

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoints")
    tiny_checkpoints.deepseek_mtp(directory, hidden=HIDDEN)
    path = directory / "deepseek_mtp"
    tensors = load_file(path / "model.safetensors")
    vocabulary = len(tensors["lm_head.weight"])
    embedding = torch.randn(vocabulary, HIDDEN, dtype=torch.bfloat16)
    head = embedding[torch.randperm(vocabulary)]
    draft = f"model.layers.{DRAFT_LAYER}."
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = head
    tensors[f"{draft}embed_tokens.weight"] = embedding.clone()
    tensors[f"{draft}shared_head.head.weight"] = head.clone()
    tensors[f"{draft}eh_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        if name.startswith(draft) and ".mlp.experts." in name:
            tensor.mul_(7)  # enough for the experts to decide some of the draft's answers
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def options(checkpoint: Path, quantization: str | None) -> dict[str, Any]:
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    if quantization is not None:
        speculative["mtp_expert_quantization"] = quantization
    return {"model": str(checkpoint), "speculative_config": speculative}


@pytest.fixture(scope="module")
def runs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, harness.Served]:
    root = tmp_path_factory.mktemp("engines")

    def serve(name: str, quantization: str | None, **environment: str) -> harness.Served:
        return harness.engine(
            root / name,
            options(checkpoint, quantization),
            target_layers=2,
            flags=("--import-drafttools",),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process fewer to start
            **environment,
        )

    return {"fp16": serve("fp16", None), "fp8": serve("fp8", "fp8", DRAFTTOOLS_FP8_EXPERTS_UNSUPPORTED="1")}


def worker(run: harness.Served) -> dict[str, Any]:
    reports = [json.loads(path.read_text()) for path in run.reports.glob("drafttools-*.json")]
    (found,) = [report for report in reports if report["drafts"]]
    return found


def acceptance(run: harness.Served) -> float:
    return run.metrics["vllm:spec_decode_num_accepted_tokens"] / run.metrics["vllm:spec_decode_num_draft_tokens"]


def test_the_target_verifies_so_tokens_are_the_same(runs: dict[str, harness.Served]) -> None:
    assert runs["fp8"].tokens == runs["fp16"].tokens
    assert len({tuple(tokens) for tokens in runs["fp8"].tokens}) == 4


def test_drafts_are_accepted_as_with_fp16_experts(runs: dict[str, harness.Served]) -> None:
    accepted = {name: acceptance(run) for name, run in runs.items()}
    print(accepted)
    assert accepted["fp16"] > 0.3
    assert abs(accepted["fp8"] - accepted["fp16"]) < 0.1


def test_only_the_drafts_expert_bytes_differ(runs: dict[str, harness.Served]) -> None:
    before, after = (worker(runs[name])["drafts"][0] for name in ("fp16", "fp8"))
    experts = EXPERTS * 3 * WIDTH * HIDDEN
    assert after["dtypes"]["float8_e4m3fn"] == experts
    assert after["dtypes"]["bfloat16"] == before["dtypes"]["bfloat16"] - experts
    changed = {
        name: (method, after["quant_methods"].get(name))
        for name, method in before["quant_methods"].items()
        if after["quant_methods"].get(name) != method
    }
    assert len(changed) == 1
    ((name, (stock, ours)),) = changed.items()
    assert name.endswith("mlp.experts.routed_experts")
    assert (stock, ours) == ("UnquantizedFusedMoEMethod", "Fp8ExpertsMethod")
    assert before["calls"].keys() == after["calls"].keys()


def test_the_report_says_what_was_done(runs: dict[str, harness.Served]) -> None:
    report = worker(runs["fp8"])
    states = {patch["name"]: patch["state"] for patch in report["patches"]}
    assert states["fp8_experts"] == "in_effect"
    assert states["expert_option"] in ("applied", "in_effect")
    fp16_bytes = EXPERTS * 3 * WIDTH * HIDDEN * 2
    fp8_bytes = fp16_bytes // 2 + EXPERTS * (2 * WIDTH + HIDDEN) * 4
    (note,) = [note for note in report["notes"] if "experts are FP8" in note]
    assert f"(online), {fp16_bytes} bytes as FP16, {fp8_bytes} resident" in note
    assert "admitted by the developer override" in note
    quiet = worker(runs["fp16"])
    assert {p["name"]: p["state"] for p in quiet["patches"]}["fp8_experts"] == "applied"
    assert not any("FP8" in note for note in quiet["notes"])
