"""Keep the user's MoE activation override for the target away from draft experts."""

from __future__ import annotations

from types import ModuleType

from drafttools.hazards import activation_override
from drafttools.patches._gate import gated
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    gate = gated(PATCH.name, module._user_moe_activation_override, None)
    transaction.replace_function(module, "_user_moe_activation_override", gate)


PATCH = Patch(
    name="moe_activation",
    module="vllm.model_executor.layers.fused_moe.oracle.mxfp4",
    seams=(Seam("_user_moe_activation_override", features=("quantization_config", "moe")),),
    what="`quantization_config.moe.activation` does not reach the experts of a draft.",
    why="It is read from the current configuration, which is the target's for EAGLE, MTP and DFlash drafts.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/fused_moe/oracle/mxfp4.py",
    retire="When vLLM reads the override from the layer's own model configuration.",
    apply=_apply,
    opt_in='--quantization-config \'{"moe": {"activation": ...}}\'',
    hazard=activation_override("moe"),
)
