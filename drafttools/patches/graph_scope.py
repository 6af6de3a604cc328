"""Capture and replay a draft's piecewise and full CUDA graphs in scope."""

from __future__ import annotations

from types import ModuleType

from drafttools.patches import _graphs
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    _graphs.scope_wrapper(
        transaction,
        module.CUDAGraphWrapper,
        PATCH.name,
        entries="concrete_cudagraph_entries",
        kind=lambda wrapper: wrapper.runtime_mode.name.lower(),
    )


PATCH = Patch(
    name="graph_scope",
    module="vllm.compilation.cuda_graph",
    seams=(
        Seam("CUDAGraphWrapper.__init__", parameters=("self", "runnable", "...")),
        Seam("CUDAGraphWrapper.__call__", features=("concrete_cudagraph_entries",)),
    ),
    what="Graph wrappers that were made for a draft capture and replay inside the draft scope.",
    why="What an op decides while a graph is captured is frozen into it.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/compilation/cuda_graph.py",
    retire="When vLLM's graph wrappers carry a draft scope of their own.",
    apply=_apply,
    native=(),
)
