"""Capture and replay a draft's breakable CUDA graphs in scope: replays run eager segments, not the draft's forward."""

from __future__ import annotations

from types import ModuleType

from drafttools.patches import _graphs
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    _graphs.scope_wrapper(
        transaction,
        module.BreakableCUDAGraphWrapper,
        PATCH.name,
        entries="entries",
        kind=lambda wrapper: "breakable",
    )


PATCH = Patch(
    name="breakable_graph_scope",
    module="vllm.compilation.breakable_cudagraph",
    seams=(
        Seam("BreakableCUDAGraphWrapper.__init__", parameters=("self", "runnable", "...")),
        Seam("BreakableCUDAGraphWrapper.__call__", features=("entries",)),
    ),
    what="Breakable graph wrappers around a draft capture and replay inside the draft scope.",
    why="A breakable replay runs its recorded eager segments (attention, for some models also quantized projections) "
    "without calling the draft at all.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/compilation/breakable_cudagraph.py",
    retire="When vLLM's graph wrappers carry a draft scope of their own.",
    apply=_apply,
    native=(),
    absent="this vLLM has no breakable graphs",
    signs=(("vllm.envs", "VLLM_USE_BREAKABLE_CUDAGRAPH"),),
)
