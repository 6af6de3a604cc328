"""Let a BF16 draft beside an FP16 target run in BF16, or stop the load."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools import attest, dtypes, settings
from drafttools.errors import DraftToolsError
from drafttools.patching import Patch, Seam, Transaction


def _post_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    draft, target = instance.draft_model_config, instance.target_model_config
    if draft is None or target is None or draft is target or draft.model == target.model:
        return
    decision = dtypes.decide(_declared(draft), _declared(target), _name(target.dtype), instance.method)
    if decision.note:
        attest.note(decision.note)
    if settings.mode() != "enforce":
        return
    stop = decision.stop or _unsupported(decision.keep)
    if stop and settings.allow_unverified():
        attest.note(f"{stop}; it runs in {_name(target.dtype)}")
    elif stop:
        raise DraftToolsError(
            f"the draft {draft.model} cannot run as shipped: {stop}. Serve the target with --dtype bfloat16, use a "
            f"draft in {_name(target.dtype)}, or set {settings.ALLOW_UNVERIFIED}=1 to have it cast and reported"
        )
    elif decision.keep:
        import torch

        # A hashed field: compiled graphs of the two dtypes stay apart.
        draft.dtype = getattr(torch, decision.keep)
        attest.evidence(PATCH.name).asked += 1
        attest.note(f"the draft keeps {decision.keep} beside a {_name(target.dtype)} target")


def _declared(model_config: Any) -> str | None:
    return dtypes.declared(model_config.hf_config.to_dict())


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _unsupported(dtype: str | None) -> str:
    """Why this machine cannot run the dtype; empty when it can."""
    if dtype is None:
        return ""
    import torch
    from vllm.platforms import current_platform

    try:
        current_platform.check_if_supports_dtype(getattr(torch, dtype))
    except (ValueError, NotImplementedError) as error:
        return "" if isinstance(error, NotImplementedError) else str(error)
    return ""


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap(module.SpeculativeConfig, "__post_init__", _post_init)


PATCH = Patch(
    name="draft_dtype",
    module="vllm.config.speculative",
    seams=(Seam("SpeculativeConfig.__post_init__", parameters=("self",), features=("draft_model_config", "dtype")),),
    what="Gives a BF16 draft checkpoint beside an FP16 target its own dtype back where the method feeds it token ids "
    "only; stops with the reason where it is fed the target's FP16 hidden states. A --dtype that the user gave wins.",
    why="vLLM builds the draft's model config with the target's dtype; BF16 weights do not survive FP16's range.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/config/speculative.py",
    retire="When vLLM resolves a draft's dtype from the draft's own config.",
    apply=_apply,
    roles=("worker", "engine_core", "api_server"),
    native=(),
)
