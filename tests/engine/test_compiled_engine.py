"""A draft whose top class is itself compiled, from a cold and from a warm cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import harness
from tests.engine.shapes import assert_in_effect, mtp

pytestmark = pytest.mark.engine


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


def _cache_keys(work: Callable[[str], Path]) -> set[str]:
    compiled = work("mtp-cache") / "torch_compile_cache"
    return {str(path.relative_to(compiled)) for path in compiled.glob("*/*") if path.is_dir()}
