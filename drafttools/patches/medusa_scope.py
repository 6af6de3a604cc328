"""Run the Medusa proposer of vLLM 0.32 and older in scope: it is no subclass of the proposer base."""

from __future__ import annotations

from types import ModuleType

from drafttools.patches import _entry_points
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_family(module.MedusaProposer, _entry_points.NAMES, _entry_points.scoped(PATCH.name))


PATCH = Patch(
    name="medusa_scope",
    module="vllm.v1.spec_decode.medusa",
    seams=(
        Seam("MedusaProposer.load_model", parameters=("self", "target_model", "...")),
        Seam("MedusaProposer.propose", parameters=("self", "...")),
    ),
    what="Runs the V1 `MedusaProposer` entry points inside the draft scope.",
    why="It loads and runs draft heads but does not derive from the common proposer base.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/medusa.py",
    retire="When vLLM 0.32 is no longer supported: 0.33.0 has no Medusa proposer.",
    apply=_apply,
    native=(),
    absent="this vLLM has no Medusa proposer",
    signs=(("vllm.config.speculative", '"medusa"'),),
)
