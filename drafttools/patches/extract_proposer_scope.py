"""Run the V1 hidden-state extractor in scope: it is no subclass of the proposer base."""

from __future__ import annotations

from types import ModuleType

from drafttools.patches import _entry_points
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_family(module.ExtractHiddenStatesProposer, _entry_points.NAMES, _entry_points.scoped(PATCH.name))


PATCH = Patch(
    name="extract_proposer_scope",
    module="vllm.v1.spec_decode.extract_hidden_states",
    seams=(
        Seam("ExtractHiddenStatesProposer.load_model", parameters=("self", "target_model", "...")),
        Seam("ExtractHiddenStatesProposer.propose", parameters=("self", "...")),
    ),
    what="Runs the V1 `ExtractHiddenStatesProposer` entry points inside the draft scope.",
    why="It loads and runs a draft model but does not derive from the common proposer base.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/spec_decode/extract_hidden_states.py",
    retire="With the V1 runner, or when vLLM scopes its proposers.",
    apply=_apply,
    native=(),
    absent="this vLLM has no V1 hidden-state extractor",
    signs=(("vllm", "ExtractHiddenStatesProposer"),),
)
