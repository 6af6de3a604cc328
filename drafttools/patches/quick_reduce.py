"""Keep ROCm's quantized all-reduce away from draft models."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools.patches._gate import gated
from drafttools.patching import Patch, Seam, Transaction
from drafttools.scope import in_draft_model


def _hazard(_: Any, envs: Any) -> str | None:
    regime = getattr(envs, "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", None)
    if not regime or str(regime).upper() == "NONE":
        return None
    return f"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION={regime}"


def _apply(transaction: Transaction, module: ModuleType) -> None:
    stock = module.QuickAllReduce.should_quick_allreduce
    for_a_draft = gated(PATCH.name, lambda: True, False)

    def should_quick_allreduce(self: Any, inp: Any) -> bool:
        # Spelled out, since every all-reduce of the target asks, too: passing on any arguments costs 0.2 us.
        answer: bool = stock(self, inp)
        return for_a_draft() if answer and in_draft_model() else answer

    transaction.replace(module.QuickAllReduce, "should_quick_allreduce", should_quick_allreduce)


PATCH = Patch(
    name="quick_reduce",
    module="vllm.distributed.device_communicators.quick_all_reduce",
    seams=(Seam("QuickAllReduce.should_quick_allreduce", parameters=("self", "inp"), features=("disabled",)),),
    what="`QuickAllReduce.should_quick_allreduce` answers False for a draft's all-reduces, so they take the lossless "
    "path. The communicator, AITER's fused all-reduce + RMSNorm and the FlyDSL INT4 path all ask this method.",
    why="Quick reduce quantizes what the ranks exchange (FP8 to INT3), and casts BF16 to FP16 without saturation for "
    "every codec, FP included.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/distributed/device_communicators/quick_all_reduce.py",
    retire="When vLLM exempts drafts from quick reduce.",
    apply=_apply,
    opt_in="VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=FP|INT8|INT6|INT4|INT3",
    hazard=_hazard,
    absent="this vLLM has no quick reduce",
    signs=(("vllm.envs", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"),),
)
