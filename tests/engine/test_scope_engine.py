"""The shim in real vLLM engines: every draft call in scope, no target call, the same tokens, through every way in."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttools import settings
from tests.engine import harness
from tests.engine.shapes import assert_in_effect, draft_model, eagle, mtp

pytestmark = pytest.mark.engine

# A spawned engine at TP 2 takes about a minute; each run below serves several tests.
RUN_CLI = (sys.executable, "-m", "drafttools.cli", "run")


def test_unpatched_workers_are_told(checkpoints: Path, work: Callable[[str], Path]) -> None:
    """The launcher has drafttools, its children do not: nothing may look in effect."""
    served = harness.engine(work("unpatched"), draft_model(checkpoints), target_layers=2, flags=("--children-off",))
    assert served.probe["host"]["draft_in"] == 0
    assert served.probe["host"]["draft_out"] > 0
    code, text = harness.status(served.reports)
    assert code == 1, text
    assert "no worker reported" in text
    _remember(work, "draft_model", served.tokens)


def test_draft_model_through_the_launcher_at_tp2(checkpoints: Path, work: Callable[[str], Path]) -> None:
    served = harness.engine(work("run"), draft_model(checkpoints), target_layers=2, prefix=(*RUN_CLI, "--"))
    workers = assert_in_effect(served, "run", "Qwen3ForCausalLM")
    assert sorted(report["rank"] for report in workers) == [0, 1]
    assert served.tokens == _remembered(work, "draft_model")


def test_one_missing_rank_is_told(work: Callable[[str], Path]) -> None:
    """The reports of the TP 2 run without one worker's."""
    reports = work("run") / "reports"
    (rank_1,) = [p for p in reports.glob("*.json") if json.loads(p.read_text())["rank"] == 1]
    kept = rank_1.read_text()
    rank_1.unlink()
    try:
        code, text = harness.status(reports)
    finally:
        rank_1.write_text(kept)
    assert code == 1
    assert "1 of 2 workers did not report (rank 1)" in text


def test_eagle_through_the_injection_directory(checkpoints: Path, work: Callable[[str], Path]) -> None:
    path = os.pathsep.join([settings.inject_dir(), str(harness.PROBE), str(harness.ROOT)])
    stock = harness.engine(work("eagle-stock"), eagle(checkpoints), target_layers=2)
    served = harness.engine(work("eagle"), eagle(checkpoints), target_layers=2, PYTHONPATH=path)
    assert_in_effect(served, "inject", "EagleLlamaForCausalLM")
    assert served.tokens == stock.tokens
    assert stock.probe["host"]["draft_in"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "options", "tp", "draft_class"),
    [
        ("draft_model", draft_model, 1, "Qwen3ForCausalLM"),
        ("eagle", eagle, 2, "EagleLlamaForCausalLM"),
        ("mtp", mtp, 2, "DeepSeekMTP"),
    ],
)
def test_the_other_world_sizes(
    checkpoints: Path,
    work: Callable[[str], Path],
    name: str,
    options: Callable[[Path, int], dict[str, Any]],
    tp: int,
    draft_class: str,
) -> None:
    """What the tests above leave out of method and world size; not part of the default run."""
    stock = harness.engine(work(f"{name}-{tp}-stock"), options(checkpoints, tp), target_layers=2)
    served = harness.engine(
        work(f"{name}-{tp}"), options(checkpoints, tp), target_layers=2, flags=("--import-drafttools",)
    )
    workers = assert_in_effect(served, "import", draft_class)
    assert len(workers) == tp
    assert served.tokens == stock.tokens


def _remember(work: Callable[[str], Path], name: str, tokens: list[list[int]]) -> None:
    work(f"{name}.json").write_text(json.dumps(tokens))


def _remembered(work: Callable[[str], Path], name: str) -> list[list[int]]:
    return json.loads(work(f"{name}.json").read_text())  # type: ignore[no-any-return]
