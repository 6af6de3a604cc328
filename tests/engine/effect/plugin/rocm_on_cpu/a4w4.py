"""FP4 activations for experts whose real ``FusedMoEConfig`` chose them.

``FusedMoEConfig.__post_init__`` decides per layer, as on ROCm: it is told that AITER is there and that it validated the
tiny models' type. Experts built with ``use_mxfp4_w4a4_dsv4`` then get the input of their first GEMM through MXFP4;
the input of the second stays exact, since the CPU kernel fuses both.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from rocm_on_cpu.counts import Counts

BLOCK = 32
MODEL_TYPE = "qwen3_moe"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1


def install(counts: Counts) -> None:
    """Let the CPU's MoE configs choose FP4 activations, and its experts obey."""
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    config._AITER_MOE_A4W4_DSV4_VALIDATED_MODEL_TYPES += (MODEL_TYPE,)
    rocm_aiter_ops.is_fused_moe_enabled = staticmethod(asked_by_config)
    rocm_aiter_ops.fused_moe_supports_quant_dtype_a = staticmethod(lambda: True)
    exact = CPUUnquantizedExperts.apply

    @functools.wraps(exact)
    def apply(self: Any, output: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        lossy = self.moe_config.use_mxfp4_w4a4_dsv4
        counts.asked(lossy)
        if lossy:
            hidden_states = through_mxfp4(hidden_states)
        return exact(self, output, hidden_states, *args, **kwargs)

    CPUUnquantizedExperts.apply = apply


def asked_by_config() -> bool:
    """Whether AITER's fused MoE is there: yes for ``FusedMoEConfig``, no for those who would go on to call it."""
    return sys._getframe(1).f_code.co_name == "__post_init__"


def through_mxfp4(x: Any) -> Any:
    """Quantize and dequantize ``x``, whose size must be a multiple of 32, to MXFP4.

    Blocks of 32 E2M1 values under a power-of-two scale (OCP Microscaling Formats v1.0, sections 5.3.3 and 6.3).
    """
    import torch

    magnitudes = torch.tensor(MAGNITUDES)
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    blocks = x.float().reshape(-1, BLOCK)
    peak = blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-120)
    scale = torch.exp2(torch.floor(torch.log2(peak)) - 2)
    quantized = magnitudes[torch.bucketize(blocks.abs() / scale, between)] * blocks.sign()
    return (quantized * scale).reshape(x.shape).to(x.dtype)
