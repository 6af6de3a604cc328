"""All-reduces through quick reduce's INT4 codec.

Every tensor-parallel all-reduce asks a real ``QuickAllReduce.should_quick_allreduce``, looked up on the class at each
call, so whoever replaces that method is obeyed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocm_on_cpu.counts import Counts

BLOCK = 32


def install(counts: Counts) -> None:
    """Replace ``CpuCommunicator.all_reduce``.

    Both phases of the two-shot kernel are simulated (vLLM ``csrc/quickreduce/quick_reduce_impl.cuh``,
    ``AllReduceTwoshot``): every rank's contribution is coded, summed in float16, and the sum is coded again.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    exact, communicator = CpuCommunicator.all_reduce, quick_all_reduce()

    @functools.wraps(exact)
    def all_reduce(self: Any, input_: Any) -> Any:
        lossy = communicator.should_quick_allreduce(input_)
        counts.asked(lossy)
        if not lossy:
            return exact(self, input_)
        return through_int4(exact(self, through_int4(input_.half()))).to(input_.dtype)

    CpuCommunicator.all_reduce = all_reduce


def quick_all_reduce() -> Any:
    """A ``QuickAllReduce`` in the state in which ROCm leaves it at TP2 with INT4, without a size threshold."""
    from vllm.distributed.device_communicators.quick_all_reduce import QuickAllReduce, QuickReduceRegime

    communicator = QuickAllReduce.__new__(QuickAllReduce)
    communicator.disabled = False
    communicator.world_size = 2
    communicator.use_fp16_kernels = True
    communicator.qr_quant_level = QuickReduceRegime.INT4
    communicator.qr_quantization_min_size = None
    communicator.qr_min_size = 0
    communicator.qr_max_size = 2**31
    return communicator


def through_int4(x: Any) -> Any:
    """Quantize and dequantize float16 ``x``, whose size must be a multiple of 64.

    As ``CodecQ4`` in the same file: blocks of 32 values, made of the even and of the odd elements of each 64; the value
    of largest magnitude maps to -8, the others are rounded to integers from -8 to 7.
    """
    blocks = x.reshape(-1, BLOCK, 2)
    high, low = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    scale = high.where(high >= -low, low) / -8
    quantized = (blocks / (scale + 1e-7)).nan_to_num(0.0).clamp(-8, 7).round()
    return (quantized * scale).reshape(x.shape)
