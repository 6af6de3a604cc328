"""Keep the target's online quantization away from draft layers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools import drafts
from drafttools.patches._gate import gated
from drafttools.patching import Patch, Seam, Transaction


def _hazard(vllm_config: Any, _: Any) -> str | None:
    quant_config = getattr(vllm_config, "quant_config", None)
    online = type(quant_config).__name__ == "OnlineQuantizationConfig"
    online = online or getattr(quant_config, "online_quantization_config", None) is not None
    if not online or not drafts.inherited_from_target(quant_config):
        return None
    return "the target's online quantization"


def _inherited(quant_config: Any, *args: Any, **kwargs: Any) -> bool:
    return drafts.inherited_from_target(quant_config)


def _apply(transaction: Transaction, module: ModuleType) -> None:
    cls = module.OnlineQuantizationConfig
    gate = gated(PATCH.name, cls.resolve_quant_method_cls, None, _inherited)
    transaction.replace(cls, "resolve_quant_method_cls", gate)


PATCH = Patch(
    name="online_quantization",
    module="vllm.model_executor.layers.quantization.online.base",
    seams=(Seam("OnlineQuantizationConfig.resolve_quant_method_cls", parameters=("self", "...")),),
    what="A draft layer that would be quantized while loading only because the target is keeps its checkpoint format. "
    "A `quantization` given for the draft itself is honoured.",
    why="MTP and other embedded drafts are built with the target's quantization config object.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/quantization/online/base.py",
    retire="When vLLM resolves online quantization per model.",
    apply=_apply,
    opt_in="--quantization fp8|mxfp8|... on an unquantized target",
    hazard=_hazard,
)
