"""Build draft MoE layers as if the FP4-activation switch were off."""

from __future__ import annotations

import functools
from types import FunctionType, ModuleType
from typing import Any

from drafttools import attest, settings
from drafttools.hazards import env_flag
from drafttools.patching import Patch, Seam, Transaction
from drafttools.scope import in_draft_model

SWITCH = "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"


class _SwitchOff:
    """`vllm.envs` with the one switch off."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs

    def __getattr__(self, name: str) -> Any:
        return False if name == SWITCH else getattr(self._envs, name)


def _apply(transaction: Transaction, module: ModuleType) -> None:
    original: FunctionType = module.FusedMoEConfig.__post_init__
    if type(original) is not FunctionType or original.__globals__ is not vars(module):
        raise RuntimeError("FusedMoEConfig.__post_init__ was already wrapped or replaced by other code")
    seen = attest.evidence(PATCH.name)
    enforcing = settings.mode() == "enforce"

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if not in_draft_model() or not getattr(original.__globals__["envs"], SWITCH):
            original(self)
            return
        seen.asked += 1
        if not enforcing:
            original(self)
            return
        seen.declined += 1
        # The same code over globals in which only the switch reads differently: nothing shared is touched.
        view = {**original.__globals__, "envs": _SwitchOff(original.__globals__["envs"])}
        as_if_off = FunctionType(
            original.__code__, view, original.__name__, original.__defaults__, original.__closure__
        )
        as_if_off(self)

    transaction.replace(module.FusedMoEConfig, "__post_init__", __post_init__)


PATCH = Patch(
    name="a4w4",
    module="vllm.model_executor.layers.fused_moe.config",
    seams=(Seam("FusedMoEConfig.__post_init__", parameters=("self",), features=("envs", SWITCH)),),
    what=f"A draft's `FusedMoEConfig` is built as if `{SWITCH}` were off: FP4 activations are neither "
    "chosen nor a reason to raise. The weight shuffle and the kernel follow the same flag.",
    why="The switch is meant for the target; for DeepSeek-V4.1's own MTP or DSpark draft it quantizes activations to "
    "FP4, and for any other draft MoE stock raises.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/fused_moe/config.py",
    retire="When the switch has a per-model form in vLLM.",
    apply=_apply,
    opt_in=f"{SWITCH}=1",
    hazard=env_flag(SWITCH),
    absent="this vLLM has no FP4-activation switch",
    signs=(("vllm.envs", SWITCH),),
)
