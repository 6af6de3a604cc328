"""Do not re-quantize a draft's MLA projections for AITER's FP8 and FP4 batched matmuls."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools.patches._gate import gated
from drafttools.patching import Patch, Seam, Transaction

_METHODS = ("is_fp8bmm_enabled", "is_fp4bmm_enabled")


def _hazard(_: Any, envs: Any) -> str | None:
    import sys

    ops = getattr(sys.modules.get("vllm._aiter_ops"), "rocm_aiter_ops", None)
    on = [name for name in _METHODS if ops is not None and getattr(ops, name)()]
    return ", ".join(f"rocm_aiter_ops.{name}()" for name in on) or None


def _apply(transaction: Transaction, module: ModuleType) -> None:
    cls = module.rocm_aiter_ops
    for name in _METHODS:
        stock = vars(cls)[name].__func__
        transaction.replace(cls, name, classmethod(gated(PATCH.name, stock, False)))


PATCH = Patch(
    name="aiter_bmm",
    module="vllm._aiter_ops",
    seams=(
        Seam("rocm_aiter_ops.is_fp8bmm_enabled", parameters=("cls",), features=("_FP8BMM_ENABLED",)),
        Seam("rocm_aiter_ops.is_fp4bmm_enabled", parameters=("cls",), features=("_FP4BMM_ENABLED",)),
    ),
    what="`rocm_aiter_ops.is_fp8bmm_enabled` and `is_fp4bmm_enabled` answer False while a draft is built.",
    why="MLA layers re-quantize `kv_b_proj` to FP8 or FP4 at load when these are on (FP8 by default up to 0.32).",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/_aiter_ops.py",
    retire="When vLLM asks per model.",
    apply=_apply,
    opt_in="VLLM_ROCM_USE_AITER_FP8BMM=1 or VLLM_ROCM_USE_AITER_FP4BMM=1",
    hazard=_hazard,
    absent="this vLLM has no AITER batched matmul switch",
    signs=(("vllm.envs", "VLLM_ROCM_USE_AITER_FP8BMM"), ("vllm.envs", "VLLM_ROCM_USE_AITER_FP4BMM")),
)
