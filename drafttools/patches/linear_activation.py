"""Keep the user's linear activation override for the target away from draft layers."""

from __future__ import annotations

from types import ModuleType

from drafttools.hazards import activation_override
from drafttools.patches._gate import gated
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    gate = gated(PATCH.name, module._user_linear_activation_override, None)
    transaction.replace_function(module, "_user_linear_activation_override", gate)


PATCH = Patch(
    name="linear_activation",
    module="vllm.model_executor.kernels.linear",
    seams=(Seam("_user_linear_activation_override", features=("quantization_config", "linear")),),
    what="`quantization_config.linear.activation` does not reach the linear layers of a draft.",
    why="It is read from the current configuration, which is the target's for EAGLE, MTP and DFlash drafts.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/kernels/linear/__init__.py",
    retire="When vLLM reads the override from the layer's own model configuration.",
    apply=_apply,
    opt_in='--quantization-config \'{"linear": {"activation": ...}}\'',
    hazard=activation_override("linear"),
    absent="this vLLM has no linear activation override",
    signs=(("vllm.model_executor.kernels", ".linear.activation"),),
)
