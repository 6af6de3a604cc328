"""Run a user's own proposer class in scope."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools.patches import _entry_points
from drafttools.patching import Patch, Seam, Transaction


def _apply(transaction: Transaction, module: ModuleType) -> None:
    scoped = _entry_points.scoped(PATCH.name)

    def create_custom_proposer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        proposer = wrapped(*args, **kwargs)
        for cls in type(proposer).__mro__[:-1]:
            for name in _entry_points.NAMES:
                method = vars(cls).get(name)
                if callable(method) and not hasattr(method, "_self_wrapper"):
                    transaction.wrap(cls, name, scoped)
        return proposer

    transaction.wrap_function(module, "create_custom_proposer", create_custom_proposer)


PATCH = Patch(
    name="custom_proposer_scope",
    module="vllm.v1.spec_decode.custom_class_proposer",
    seams=(Seam("create_custom_proposer", parameters=("vllm_config", "...")),),
    what="Runs `load_model`, `propose` and `dummy_run` of a `custom_class` proposer inside the draft scope.",
    why="Its modules are built by user code, so no loader of vLLM's sees them; only its own entry points do.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/spec_decode/custom_class_proposer.py",
    retire="When vLLM scopes custom proposers.",
    apply=_apply,
    native=(),
    absent="this vLLM has no custom_class proposer",
    signs=(("vllm", "create_custom_proposer"),),
)
