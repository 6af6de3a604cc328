"""A vLLM worker extension that counts tensor-parallel all-reduces by path, and gives NVIDIA a lossy one.

`worker_extension_cls="tests.gpu.all_reduces.AllReduces"`: vLLM imports this in each worker before the communicators are
made. With `VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4` the communicator gets a real `QuickAllReduce` object in the state
in which ROCm leaves it; vLLM's own `CudaCommunicator.all_reduce` asks it first, and only its arithmetic is simulated.

Counts are kept on the host and, by a kernel beside each all-reduce, on the device, where graph replays count too.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from tests.engine.effect.plugin.rocm_on_cpu.quick_reduce import quick_all_reduce, through_int4

PLACES = ("target", "draft")
PATHS = {  # attribute of CudaCommunicator, and the method that reduces
    "quick": ("qr_comm", "quick_all_reduce"),
    "custom": ("ca_comm", "custom_all_reduce"),
    "symm_mem": ("symm_mem_comm", "all_reduce"),
    "nccl": ("pynccl_comm", "all_reduce"),
}
DRAFT_DIRECTORY = f"{os.sep}spec_decode{os.sep}"  # of both runners


class Counts:
    """All-reduces of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.host = {place: dict.fromkeys(PATHS, 0) for place in PLACES}
        self.device = torch.zeros(len(PLACES), len(PATHS), dtype=torch.int64, device=device)
        self.decisions = hashlib.sha256()

    def add(self, path: str, tensor: torch.Tensor) -> None:
        """Count one all-reduce of `tensor`."""
        place = caller()
        self.host[place][path] += 1
        self.decisions.update(f"{place} {path} {tuple(tensor.shape)}\n".encode())
        self.device[PLACES.index(place), list(PATHS).index(path)] += 1

    def as_json(self) -> dict[str, Any]:
        """Counts per place and path, and the digest of every decision of the host in its order."""
        device = {
            place: dict(zip(PATHS, row, strict=True)) for place, row in zip(PLACES, self.device.tolist(), strict=True)
        }
        return {"host": self.host, "device": device, "decisions": self.decisions.hexdigest()}


def caller() -> str:
    """`draft` when vLLM's speculative decoding code is on the stack, else `target`; drafttools is not asked."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if DRAFT_DIRECTORY in frame.f_code.co_filename:
            return "draft"
    return "target"


def _install() -> None:
    constructor = CudaCommunicator.__init__

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        if self.unique_name.split(":")[0] == "tp" and self.world_size > 1:
            _count(self)

    CudaCommunicator.__init__ = __init__


def _count(communicator: Any) -> None:
    counts = AllReduces.counts = Counts(communicator.device)
    if envs.VLLM_ROCM_QUICK_REDUCE_QUANTIZATION == "INT4":
        communicator.qr_comm = _lossy(_exact(communicator))
    for path, (attribute, method) in PATHS.items():
        owner = getattr(communicator, attribute)
        if owner is not None:
            setattr(owner, method, _counted(getattr(owner, method), path, counts))


def _exact(communicator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The all-reduce vLLM takes on NVLink, or torch's; not counted."""
    custom = communicator.ca_comm
    reduce = custom.custom_all_reduce if custom is not None and not custom.disabled else None

    def exact(x: torch.Tensor) -> torch.Tensor:
        if reduce is not None and custom.should_custom_ar(x):
            result: torch.Tensor = reduce(x)
            return result
        result = x.clone()
        torch.distributed.all_reduce(result, group=communicator.device_group)
        return result

    return exact


def _lossy(exact: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Quick reduce at TP2 with INT4: contributions and their sum pass through the codec."""
    communicator = quick_all_reduce()
    communicator._flydsl_int4 = None
    communicator.quick_all_reduce = lambda x: through_int4(exact(through_int4(x.half()))).to(x.dtype)
    return communicator


def _counted(reduce: Callable[..., Any], path: str, counts: Counts) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = reduce(tensor, *args, **kwargs)
        if result is not None:  # else vLLM goes on to another path
            counts.add(path, tensor)
        return result

    return counted


class AllReduces:
    """Mixed into vLLM's worker: `llm.collective_rpc("all_reduces")` gives the counts of every rank."""

    counts: Counts | None = None

    def all_reduces(self) -> dict[str, Any] | None:
        """The counts so far; None before the communicators are made."""
        torch.cuda.synchronize()
        return AllReduces.counts.as_json() if AllReduces.counts else None


_install()
