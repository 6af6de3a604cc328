"""Count the FULL CUDA graphs that the V2 runner captures for a draft."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools import attest
from drafttools.patching import Patch, Seam, Transaction
from drafttools.scope import in_draft_model


def _capture(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if not in_draft_model():
        return wrapped(*args, **kwargs)
    before = len(instance.graphs)
    result = wrapped(*args, **kwargs)
    attest.evidence(PATCH.name).asked += 1
    attest.count_captures("full", len(instance.graphs) - before)
    return result


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap(module.CudaGraphManager, "capture", _capture)


PATCH = Patch(
    name="speculator_graphs",
    module="vllm.v1.worker.gpu.cudagraph_utils",
    seams=(Seam("CudaGraphManager.capture", parameters=("self", "..."), features=("graphs",)),),
    what="Counts the FULL graphs captured by a draft speculator's graph manager.",
    why="A captured graph replays what was decided at capture; the report must show that it happened in scope.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/worker/gpu/cudagraph_utils.py",
    retire="With speculator_scope.",
    apply=_apply,
    native=(),
    absent="this vLLM has no V2 graph manager",
    signs=(("vllm.v1.worker.gpu", "CudaGraphManager"),),
)
