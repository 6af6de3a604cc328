"""Run the V1 runner's draft proposers in scope."""

from __future__ import annotations

from types import ModuleType

from drafttools.patches import _entry_points
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_family(module.SpecDecodeBaseProposer, _entry_points.NAMES, _entry_points.scoped(PATCH.name))


PATCH = Patch(
    name="proposer_scope",
    module="vllm.v1.spec_decode.llm_base_proposer",
    seams=(
        Seam("SpecDecodeBaseProposer.load_model", parameters=("self", "target_model", "...")),
        Seam("SpecDecodeBaseProposer.propose", parameters=("self", "...")),
        Seam("SpecDecodeBaseProposer.dummy_run", parameters=("self", "...")),
    ),
    what="Runs `load_model`, `propose` and `dummy_run` of the V1 proposers inside the draft scope, subclasses "
    "included, also those defined later.",
    why="The runner embeds tokens (an all-reduce), combines hidden states, computes logits and replays breakable "
    "graphs without calling the draft's forward.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/spec_decode/llm_base_proposer.py",
    retire="With the V1 runner, or when vLLM scopes its proposers.",
    apply=_apply,
    native=(),
    absent="this vLLM has no V1 proposer base class",
    signs=(("vllm.v1.spec_decode", "get_model("),),
)
