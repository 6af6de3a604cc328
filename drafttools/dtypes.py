"""The dtype a draft runs in: its own, where the family can, although vLLM gives it the target's.

vLLM builds the draft's ModelConfig with the target's dtype (config/speculative.py, 0.33.0). BF16 weights cast to FP16
overflow above 65504 and flush below 6e-8, so a BF16 draft beside an FP16 target can lose every proposal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafttools.names import text_config

BF16, FP16 = "bfloat16", "float16"
# Methods whose draft sees token ids only. The others are fed the target's hidden states, which are in its dtype.
TAKES_TOKENS_ONLY = frozenset({"draft_model"})


@dataclass(frozen=True)
class DtypeDecision:
    """`keep` is the dtype to give back to the draft, `stop` why it cannot have it, `note` what to report."""

    keep: str | None = None
    stop: str = ""
    note: str = ""


def declared(config: Mapping[str, Any]) -> str | None:
    """The dtype a config.json declares; transformers 5 calls it `dtype`, older ones `torch_dtype`."""
    for part in (text_config(config), config):
        value = part.get("dtype") or part.get("torch_dtype")
        if value:
            return str(value).removeprefix("torch.")
    return None


def decide(own: str | None, target_declared: str | None, target_runs: str, method: str | None) -> DtypeDecision:
    """Decide for a draft that has a checkpoint of its own.

    `own` and `target_declared` are what the two config.json declare, `target_runs` the dtype that the target runs in. A
    target that runs in another dtype than it declares was told to by the user, and the draft follows.
    """
    if own != BF16 or target_runs != FP16:
        return DtypeDecision()
    if target_declared not in (None, FP16):
        return DtypeDecision(note=f"the draft runs in {FP16} as --dtype asks, its checkpoint is in {BF16}")
    if method in TAKES_TOKENS_ONLY:
        return DtypeDecision(keep=BF16)
    return DtypeDecision(
        stop=f"the draft's checkpoint is in {BF16} and the {method} method feeds it the target's {FP16} hidden states"
    )
