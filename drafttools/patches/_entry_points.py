"""What the scope patches of the runners share: every entry point of a proposer or speculator enters the scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttools import attest, drafts
from drafttools.scope import call_in_scope

NAMES = ("load_model", "propose", "dummy_run", "capture")
_LOOK_EVERY = 16  # calls between looks at whether the report is due


def scoped(patch_name: str) -> Callable[..., Any]:
    """A wrapt wrapper that runs the entry point in scope and counts it.

    It runs once in each step, when the processor's caches hold nothing of it: every function it calls costs 5 us.
    """
    seen = attest.evidence(patch_name)
    counts = attest.entry_points

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        name = wrapped.__name__
        if name == "load_model":
            result = call_in_scope(_load, (wrapped, instance, args, kwargs), {})
            drafts.note_shared_modules()
        else:
            result = call_in_scope(wrapped, args, kwargs)
        entry_point = type(instance), name
        count = counts[entry_point] = counts.get(entry_point, 0) + 1
        if count == 1 or count % _LOOK_EVERY == 0:
            seen.asked = count
            attest.entered(first=count == 1)
        return result

    return wrapper


def _load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Check what the draft needs here, if neither of the loaders' patches stands, which check otherwise."""
    if drafts.no_loader_checks():
        drafts.before_load(instance.vllm_config)
    return wrapped(*args, **kwargs)
