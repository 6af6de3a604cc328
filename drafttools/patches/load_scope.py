"""Run a draft's whole load in scope, and mark the loaded draft."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools import attest, drafts
from drafttools.patching import Patch, Seam, Transaction
from drafttools.scope import in_draft_model, is_draft_config


def _load_model(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    vllm_config, model_config, prefix = _arguments(*args, **kwargs)
    attest.worker_loaded(vllm_config)
    if is_draft_config(vllm_config, model_config) and not drafts.loading():
        return drafts.load(vllm_config, model_config, prefix, lambda: wrapped(*args, **kwargs))
    model = wrapped(*args, **kwargs)
    if not in_draft_model():
        drafts.target_loaded(model, vllm_config)
    return model


def _arguments(vllm_config: Any, model_config: Any = None, prefix: str = "", **_: Any) -> tuple[Any, Any, str]:
    return vllm_config, model_config, prefix


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_family(module.BaseModelLoader, ("load_model",), _load_model)


PATCH = Patch(
    name="load_scope",
    module="vllm.model_executor.model_loader.base_loader",
    seams=(
        Seam(
            "BaseModelLoader.load_model",
            parameters=("self", "vllm_config", "model_config", "..."),
            features=("load_weights",),
        ),
    ),
    what="Loads a draft model inside the draft scope, from construction through weight processing, and makes every "
    "later call of that one model object enter the scope.",
    why="Several precision decisions are taken only while weights load or are processed, after `initialize_model` has "
    "returned; and runners call `compute_logits`, `embed_input_ids` and other methods outside `forward`.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/model_loader/base_loader.py",
    retire="When vLLM enters a draft scope of its own around the load and around every call of a draft.",
    apply=_apply,
    native=(),
)
