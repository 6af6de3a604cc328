"""An engine without a draft under the shim."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import harness

pytestmark = pytest.mark.engine


def test_without_a_draft_nothing_changes(checkpoints: Path, work: Callable[[str], Path]) -> None:
    """No draft, no opt-in: tokens and log-probabilities are bit-equal, and no patch is seen doing anything."""
    options = {"model": str(checkpoints / "qwen3"), "enforce_eager": True}
    stock = harness.engine(work("plain-stock"), options, target_layers=2)
    served = harness.engine(work("plain"), options, target_layers=2, flags=("--import-drafttools",))
    assert served.tokens == stock.tokens
    assert served.logprobs == stock.logprobs
    assert served.probe["host"]["target_in"] == 0
    reports = [json.loads(path.read_text()) for path in served.reports.glob("*.json")]
    assert any(report["role"] == "worker" for report in reports)
    assert not any(report["drafts"] for report in reports)
    assert "in_effect" not in {patch["state"] for report in reports for patch in report["patches"]}
    code, text = harness.status(served.reports)
    assert code == 1, text
    assert "no worker reported a draft model" in text
