"""Run the V2 runner's draft speculators in scope."""

from __future__ import annotations

from types import ModuleType

from drafttools.patches import _entry_points
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_family(module.DraftModelSpeculator, _entry_points.NAMES, _entry_points.scoped(PATCH.name))


PATCH = Patch(
    name="speculator_scope",
    module="vllm.v1.worker.gpu.spec_decode.speculator",
    seams=(Seam("DraftModelSpeculator.load_model", parameters=("self", "target_model", "...")),),
    what="Runs `load_model`, `capture` and `propose` of the V2 speculators inside the draft scope, subclasses "
    "included, also those defined later. Speculators without a model (ngram) are left alone.",
    why="A FULL graph freezes what was decided at capture, and its replay calls no Python of the draft; the runner "
    "also embeds tokens and precomputes context KV outside the draft's forward.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/worker/gpu/spec_decode/speculator.py",
    retire="When vLLM scopes its speculators.",
    apply=_apply,
    native=(),
    absent="this vLLM has no V2 draft speculators",
    signs=(("vllm.v1.worker.gpu", "Speculator"),),
)
