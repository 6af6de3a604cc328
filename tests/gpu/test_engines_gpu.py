"""The shim in engines on a real GPU: CUDA graphs, both runners, expert routing, FP8 experts, cost.

All engines run once, side by side, for all tests of this file (about seven minutes).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import cases

torch = pytest.importorskip("torch")


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return None if importlib.util.find_spec("vllm") else "needs an importable vLLM"


MISSING = _missing()
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from tests.gpu import validate

    out: Path = tmp_path_factory.mktemp("gpu")
    return validate.validate(out, cases.ENGINES, at_once=20, budget_s=900, turns=cases.TURNS, turns_s=300)


@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.name)
def test_check(check: cases.Check, results: dict[str, Any]) -> None:
    from tests.gpu import validate

    verdict, detail = check.verdict(validate.outcomes_of(results))
    assert verdict == "holds", detail
