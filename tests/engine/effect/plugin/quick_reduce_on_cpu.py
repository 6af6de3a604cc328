"""vLLM general plugin: the CPU engine reduces through quick reduce's INT4 codec, as a ROCm engine does.

Put this directory on ``PYTHONPATH`` and set ``QUICK_REDUCE_ON_CPU`` to a directory for the counts; without the
variable the plugin does nothing. The codec itself is asked for by vLLM's own variable,
``VLLM_ROCM_QUICK_REDUCE_QUANTIZATION`` (``INT4``, ``INT3`` or ``NONE``).

Every tensor-parallel all-reduce asks a real ``QuickAllReduce.should_quick_allreduce``, looked up on the class at
each call, so whoever replaces that method is obeyed. Each process counts, per place (``target`` forward, ``draft``
proposer, ``other``), how often it asked and how often it then used the codec, in ``DIR/counts-<pid>.json``.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

SWITCH = "QUICK_REDUCE_ON_CPU"
BLOCK = 32
TARGET_FORWARD = "_model_forward"
DRAFT_MODULE = os.path.join("vllm", "v1", "spec_decode", "llm_base_proposer.py")


def activate() -> None:
    """Entry point: patch the CPU communicator, and count the target's forwards."""
    if not os.environ.get(SWITCH):
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    counts = Counts(pathlib.Path(os.environ[SWITCH]) / f"counts-{os.getpid()}.json")
    CpuCommunicator.all_reduce = quick_reduced(CpuCommunicator.all_reduce, counts)
    setattr(GPUModelRunner, TARGET_FORWARD, counted(getattr(GPUModelRunner, TARGET_FORWARD), counts))


class Counts:
    """What happened where. Written at every change, because workers are killed and run no exit handlers."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.counts = {where: {"forwards": 0, "asked": 0, "codec": 0} for where in ("target", "draft", "other")}

    def add(self, where: str, what: str) -> None:
        self.counts[where][what] += 1
        self.path.write_text(json.dumps(self.counts))


def place() -> str:
    """Who is calling: ``target``, ``draft`` or ``other``. Told by the stack: no method of the draft is touched."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code.co_filename.endswith(DRAFT_MODULE):
            return "draft"
        if frame.f_code.co_name == TARGET_FORWARD:
            return "target"
    return "other"


def counted(forward: Callable[..., Any], counts: Counts) -> Callable[..., Any]:
    """The target's forward, counted."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        counts.add("target", "forwards")
        return forward(*args, **kwargs)

    return wrapper


def quick_reduced(all_reduce: Callable[..., Any], counts: Counts) -> Callable[..., Any]:
    """``CpuCommunicator.all_reduce`` that goes through the codec whenever quick reduce says it would.

    Both phases of the two-shot kernel are simulated (vLLM ``csrc/quickreduce/quick_reduce_impl.cuh``,
    ``AllReduceTwoshot``): every rank's contribution is coded, summed in float16, and the sum is coded again.
    """
    communicator, levels = quick_all_reduce()

    @functools.wraps(all_reduce)
    def wrapper(self: Any, input_: Any) -> Any:
        where = place()
        counts.add(where, "asked")
        if not communicator.should_quick_allreduce(input_):
            return all_reduce(self, input_)
        counts.add(where, "codec")
        contribution = through_codec(input_.half(), levels)
        return through_codec(all_reduce(self, contribution), levels).to(input_.dtype)

    return wrapper


def quick_all_reduce() -> tuple[Any, int]:
    """A ``QuickAllReduce`` set up as on ROCm at TP2 with no size threshold, and its codec's negative levels."""
    from vllm import envs
    from vllm.distributed.device_communicators.quick_all_reduce import QuickAllReduce, QuickReduceRegime

    regime = QuickReduceRegime[envs.VLLM_ROCM_QUICK_REDUCE_QUANTIZATION]
    communicator = QuickAllReduce.__new__(QuickAllReduce)
    communicator.disabled = regime is QuickReduceRegime.NONE
    communicator.world_size = 2
    communicator.use_fp16_kernels = True
    communicator.qr_quant_level = regime
    communicator.qr_quantization_min_size = None
    communicator.qr_min_size = 0
    communicator.qr_max_size = 2**31
    return communicator, {QuickReduceRegime.INT4: 8, QuickReduceRegime.INT3: 4}.get(regime, 0)


def through_codec(x: Any, levels: int) -> Any:
    """Quantize and dequantize float16 ``x``; its size must be a multiple of 64.

    As ``CodecQ4`` of the same file: blocks of 32 values, made of the even and of the odd elements of each 64; the
    value of largest magnitude maps to ``-levels``, the rest is rounded to integers in ``[-levels, levels - 1]``.
    INT3 is taken as the same scheme with 4 levels.
    """
    blocks = x.reshape(-1, BLOCK, 2)
    high, low = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    scale = high.where(high >= -low, low) / -levels
    quantized = (blocks / (scale + 1e-7)).nan_to_num(0.0).clamp(-levels, levels - 1).round()
    return (quantized * scale).reshape(x.shape)
