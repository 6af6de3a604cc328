"""Keep Marlin's process-wide activation dtype away from draft layers."""

from __future__ import annotations

from types import ModuleType

from drafttools.hazards import env_flag
from drafttools.patches._gate import gated
from drafttools.patching import Patch, Seam, Transaction

SWITCH = "VLLM_MARLIN_INPUT_DTYPE"


def _apply(transaction: Transaction, module: ModuleType) -> None:
    gate = gated(PATCH.name, module.get_marlin_input_dtype, None)
    transaction.replace_function(module, "get_marlin_input_dtype", gate)


PATCH = Patch(
    name="marlin_input",
    module="vllm.model_executor.layers.quantization.utils.marlin_utils",
    seams=(Seam("get_marlin_input_dtype", features=(SWITCH,)),),
    what="`get_marlin_input_dtype` answers None for a draft layer, at construction and at weight processing.",
    why=f"`{SWITCH}` quantizes the activations of every Marlin layer in the process to INT8 or FP8.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/quantization/utils/marlin_utils.py",
    retire="When vLLM has a per-model form of the switch.",
    apply=_apply,
    opt_in=f"{SWITCH}=int8|fp8",
    hazard=env_flag(SWITCH),
    absent="this vLLM has no Marlin activation switch",
    signs=(("vllm.envs", SWITCH),),
)
