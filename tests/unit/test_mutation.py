"""Every patch does its own job and no other's: switched off, exactly its own effect is gone."""

from __future__ import annotations

import pytest

from drafttools import patches
from tests.processes import VllmProcess
from tests.unit import effects

pytestmark = pytest.mark.vllm
NAMES = [patch.name for patch in patches.ALL]


def test_each_patch_has_an_effect() -> None:
    assert sorted(effects.EFFECTS) == sorted(NAMES)


def test_each_hazard_has_a_gate() -> None:
    gated = {patch.name for patch in patches.ALL if patch.hazard is not None}
    assert gated - set(effects.GATES) <= {"expert_option", "fp8_experts"}  # options of ours, not switches of vLLM's


def test_all_effects_hold(vllm_process: VllmProcess) -> None:
    found = vllm_process.call(effects.holding)
    assert found == dict.fromkeys(found, True)
    assert {"load_scope", "quick_reduce", "a4w4"} <= found.keys()


def test_stock_has_none_of_them(vllm_process: VllmProcess) -> None:
    found = vllm_process.call(effects.holding, mode="off")
    assert not [name for name, holds in found.items() if holds is True]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_patch_only_its_effect_is_gone(vllm_process: VllmProcess, name: str) -> None:
    found = vllm_process.call(effects.holding, DRAFTTOOLS_DISABLE=name)
    if name not in found:
        pytest.skip(f"this vLLM does not need {name}")
    assert found.pop(name) is not True
    assert found == dict.fromkeys(found, True)
