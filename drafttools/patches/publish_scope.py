"""Publish the draft scope where vLLM would."""

from __future__ import annotations

from types import ModuleType

from drafttools import scope
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.replace(module, "draft_model_scope", scope.draft_model_scope)
    transaction.replace(module, "in_draft_model", scope.in_draft_model)


def _use_upstream(module: ModuleType) -> None:
    scope.delegate_to(module.draft_model_scope, module.in_draft_model)


PATCH = Patch(
    name="publish_scope",
    module="vllm.config",
    seams=(Seam("draft_model_scope", optional=True), Seam("in_draft_model", optional=True)),
    what="Publishes `vllm.config.draft_model_scope` and `vllm.config.in_draft_model`.",
    why="Code and tests written against vLLM's own names run unchanged, whether vLLM or drafttools provides them.",
    upstream="https://github.com/vllm-project/vllm (names proposed for vllm.config; absent in 0.33.0)",
    retire="When the oldest supported vLLM defines both names itself.",
    apply=_apply,
    native=(),
    roles=("worker", "engine_core", "api_server"),
    provides=("draft_model_scope", "in_draft_model"),
    stand_down=_use_upstream,
)
