"""Engine options for each kind of draft, and what must hold of one served under the shim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine import harness


def draft_model(checkpoints: Path, tp: int = 2) -> dict[str, Any]:
    config = {
        "method": "draft_model",
        "model": str(checkpoints / "qwen3_draft"),
        "num_speculative_tokens": 2,
        "draft_tensor_parallel_size": tp,
    }
    return {
        "model": str(checkpoints / "qwen3"),
        "speculative_config": config,
        "tensor_parallel_size": tp,
        "enforce_eager": True,
    }


def eagle(checkpoints: Path, tp: int = 1) -> dict[str, Any]:
    config = {"method": "eagle", "model": str(checkpoints / "llama_eagle"), "num_speculative_tokens": 2}
    return {
        "model": str(checkpoints / "llama"),
        "speculative_config": config,
        "tensor_parallel_size": tp,
        "enforce_eager": True,
    }


def mtp(checkpoints: Path, tp: int = 1) -> dict[str, Any]:
    """Compiled: the draft class is itself `@support_torch_compile`."""
    return {
        "model": str(checkpoints / "deepseek_mtp"),
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "tensor_parallel_size": tp,
    }


def assert_in_effect(served: harness.Served, way_in: str, draft_class: str) -> list[dict[str, Any]]:
    """The probe saw every draft call in scope and no target call; the reports say the same."""
    host = served.probe["host"]
    assert host["draft_in"] > 0
    assert host["draft_out"] == 0
    assert host["target_in"] == 0
    assert host["target_out"] > 0
    code, text = harness.status(served.reports)
    assert code == 0, text
    reports = [json.loads(path.read_text()) for path in served.reports.glob("*.json")]
    assert {report["way_in"] for report in reports} == {way_in}
    workers = [report for report in reports if report["role"] == "worker" and report["drafts"]]
    for report in workers:
        (draft,) = report["drafts"]
        assert draft["class"] == draft_class
        assert draft["calls"]["__call__"] > 0
        assert draft["calls"]["compute_logits"] > 0
    return workers
