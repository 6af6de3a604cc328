"""What the scope patches of the runners share: every entry point of a proposer or speculator enters the scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttools import attest, drafts
from drafttools.scope import draft_model_scope

NAMES = ("load_model", "propose", "dummy_run", "capture")


def scoped(patch_name: str) -> Callable[..., Any]:
    """A wrapt wrapper that runs the entry point in scope and counts it."""
    seen = attest.evidence(patch_name)

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.asked += 1
        with draft_model_scope():
            result = wrapped(*args, **kwargs)
        name = wrapped.__name__
        if name == "load_model":
            drafts.note_shared_modules()
        attest.entered(type(instance), name)
        return result

    return wrapper
