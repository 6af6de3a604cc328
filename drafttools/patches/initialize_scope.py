"""Construct a draft in scope, also where a loader calls `initialize_model` without `BaseModelLoader.load_model`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools import attest, drafts
from drafttools.patching import Patch, Seam, Transaction
from drafttools.scope import draft_model_scope, is_draft_config


def _initialize_model(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    vllm_config, model_config = _arguments(*args, **kwargs)
    if not is_draft_config(vllm_config, model_config):
        # Keeps the scope as it is: nested calls inside a draft pass copies of its configuration.
        return wrapped(*args, **kwargs)
    if not drafts.loading():  # the load scope is not there, or not used
        drafts.before_load(vllm_config)
    attest.evidence(PATCH.name).asked += 1
    with draft_model_scope():
        return wrapped(*args, **kwargs)


def _arguments(vllm_config: Any, *, model_config: Any = None, **_: Any) -> tuple[Any, Any]:
    return vllm_config, model_config


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_function(module, "initialize_model", _initialize_model)


PATCH = Patch(
    name="initialize_scope",
    module="vllm.model_executor.model_loader.utils",
    seams=(
        Seam(
            "initialize_model",
            parameters=("vllm_config", "..."),
            features=("model_config", "set_current_vllm_config"),
        ),
    ),
    what="Runs `initialize_model` inside the draft scope when it is given the draft's own model configuration.",
    why="The weight-cache loader and external loaders construct a draft without `BaseModelLoader.load_model`.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/model_loader/utils.py",
    retire="When `initialize_model` enters a draft scope of vLLM's own.",
    apply=_apply,
)
