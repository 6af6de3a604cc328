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

pytestmark = pytest.mark.engine

# A spawned engine at TP 2 takes about a minute; each run below serves several tests.
RUN_CLI = (sys.executable, "-m", "drafttools.cli", "run")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from tests.engine import tiny_checkpoints

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoints")
    for make in (tiny_checkpoints.llama, tiny_checkpoints.qwen3, tiny_checkpoints.deepseek_mtp):
        make(directory)
    return directory


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("engines")
    return lambda name: root / name


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


def test_compiled_mtp_from_a_cold_and_a_warm_cache(checkpoints: Path, work: Callable[[str], Path]) -> None:
    """The draft's top class is itself compiled; stock and shim share one cache root and must not share graphs."""
    cache = {"VLLM_CACHE_ROOT": str(work("mtp-cache"))}
    stock = harness.engine(work("mtp-stock"), mtp(checkpoints), target_layers=2, **cache)
    after_stock = _cache_keys(work)
    cold = harness.engine(work("mtp-cold"), mtp(checkpoints), target_layers=2, flags=("--import-drafttools",), **cache)
    after_cold = _cache_keys(work)
    warm = harness.engine(work("mtp-warm"), mtp(checkpoints), target_layers=2, DRAFTTOOLS="enforce", **cache)
    assert_in_effect(cold, "import", "DeepSeekMTP")
    assert_in_effect(warm, "plugin", "DeepSeekMTP")
    assert cold.tokens == stock.tokens
    assert warm.tokens == stock.tokens
    assert after_stock < after_cold, "the shim must not reuse graphs compiled without it"
    assert _cache_keys(work) == after_cold, "a second run under the shim must reuse the first one's graphs"


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


def _cache_keys(work: Callable[[str], Path]) -> set[str]:
    compiled = work("mtp-cache") / "torch_compile_cache"
    return {str(path.relative_to(compiled)) for path in compiled.glob("*/*") if path.is_dir()}


def _remember(work: Callable[[str], Path], name: str, tokens: list[list[int]]) -> None:
    work(f"{name}.json").write_text(json.dumps(tokens))


def _remembered(work: Callable[[str], Path], name: str) -> list[list[int]]:
    return json.loads(work(f"{name}.json").read_text())  # type: ignore[no-any-return]
