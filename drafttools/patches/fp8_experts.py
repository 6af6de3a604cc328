"""Give a draft's routed experts the FP8-resident method."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools.patches import expert_option
from drafttools.patching import Patch, Seam, Transaction
from drafttools.scope import in_draft_model


def _get_quant_method(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if not in_draft_model():
        return wrapped(*args, **kwargs)
    prefix, _, moe_config = _arguments(*args, **kwargs)
    from drafttools.experts.selection import choose

    return choose(prefix, moe_config, lambda: wrapped(*args, **kwargs))


def _arguments(prefix: str, quant_config: Any, moe_config: Any) -> tuple[str, Any, Any]:
    return prefix, quant_config, moe_config


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap(module.RoutedExperts, "_get_quant_method", _get_quant_method)


PATCH = Patch(
    name="fp8_experts",
    module="vllm.model_executor.layers.fused_moe.routed_experts",
    seams=(
        Seam(
            "RoutedExperts._get_quant_method",
            parameters=("self", "prefix", "quant_config", "moe_config"),
            features=("UnquantizedFusedMoEMethod",),
        ),
    ),
    relies_on=(
        Seam(
            "RoutedExperts.load_weights", parameters=("self", "weights"), features=("is_fused_checkpoint_transposed",)
        ),
    ),
    what="MTP experts stay in FP8: quantized while they load when `mtp_expert_quantization` is `fp8`, or with the "
    "checkpoint's own bytes and 128x128 scales; they run `drafttools::fp8_experts`.",
    why="vLLM has no FP8 experts for compute capability 7.0, so a V100 holds a draft's experts in FP16.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/fused_moe/routed_experts.py",
    retire="When vLLM runs FP8 experts on compute capability 7.0.",
    apply=_apply,
    opt_in=expert_option.OPT_IN,
    hazard=expert_option.hazard,
    native=("mtp_expert_quantization",),
)
