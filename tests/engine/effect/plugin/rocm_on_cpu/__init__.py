"""vLLM general plugin: the CPU engine lowers precision where a ROCm engine does, by vLLM's own switches.

Put the directory of this package on ``PYTHONPATH`` and set ``ROCM_ON_CPU`` to a directory for the counts; without that
variable nothing happens. ``VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4`` codes all-reduces,
``VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4=1`` gives experts FP4 activations. Whether to do it is decided by the code that
decides on ROCm; only the arithmetic is simulated.

Each process counts in ``DIR/counts-<pid>.json``, apart for the target and the draft. Who is calling is told by the
stack: nothing of the draft is touched, and drafttools is not needed for it.
"""

from __future__ import annotations

import os
import pathlib

SWITCH = "ROCM_ON_CPU"


def activate() -> None:
    """Entry point, called by vLLM in every process that may load a model."""
    if not os.environ.get(SWITCH):
        return
    from vllm import envs

    from rocm_on_cpu import a4w4, quick_reduce
    from rocm_on_cpu.counts import Counts

    counts = Counts(pathlib.Path(os.environ[SWITCH]) / f"counts-{os.getpid()}.json")
    counts.count_forwards()
    if envs.VLLM_ROCM_QUICK_REDUCE_QUANTIZATION != "NONE":
        quick_reduce.install(counts)
    if envs.VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4:
        a4w4.install(counts)
