"""The draft scope: which code runs on behalf of a draft model.

The flag is a context variable, so threads and tasks that serve the target never inherit it by accident.
It may be read in construction code, inside opaque custom ops and outside compiled code only: Dynamo cannot
trace a context variable. Standard library only, since this is imported by every Python process.
"""

from __future__ import annotations

from contextvars import ContextVar

TYPE_CHECKING = False  # the import of typing took 3 of the 8 ms that this package took
if TYPE_CHECKING:
    from typing import Any

# The open scopes, innermost first: (what is open outside it, vLLM's own scope entered with it), None when there is none.
_open: ContextVar[tuple[Any, Any] | None] = ContextVar("drafttools_open_scopes", default=None)

# The innermost open scope, or None: one C call, for what runs several times in each step.
innermost = _open.get

# vLLM's own `vllm.config.draft_model_scope` and `in_draft_model`, where the installed vLLM has them.
_upstream: tuple[Any, Any] | None = None


def in_draft_model() -> bool:
    """Whether the calling code runs for a draft model."""
    if _upstream is not None:
        return bool(_upstream[1]())
    return _open.get() is not None


class draft_model_scope:
    """Context manager: inside it `in_draft_model()` is True, afterwards what it was before.

    Re-entrant, the same object too: what is open is kept in the context, none of it in the object.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        vllm_scope = None
        if _upstream is not None:
            vllm_scope = _upstream[0]()
            vllm_scope.__enter__()
        _open.set((_open.get(), vllm_scope))

    def __exit__(self, *exc: object) -> None:
        entry = _open.get()
        if entry is None:  # entered in another context
            return
        _open.set(entry[0])
        if entry[1] is not None:
            entry[1].__exit__(*exc)


def call_in_scope(function: Any, args: Any, kwargs: Any) -> Any:
    """`function(*args, **kwargs)` inside `draft_model_scope()`, at half its cost: a runner does this in each step."""
    if _upstream is not None:
        with draft_model_scope():
            return function(*args, **kwargs)
    token = _open.set((None, None))
    try:
        return function(*args, **kwargs)
    finally:
        _open.reset(token)


def delegate_to(upstream_scope: Any, upstream_in_draft: Any) -> None:
    """Use vLLM's own scope functions from now on; ours stay thin wrappers around them."""
    global _upstream
    _upstream = (upstream_scope, upstream_in_draft)


def stop_delegating() -> None:
    """Undo `delegate_to`."""
    global _upstream
    _upstream = None


def is_draft_config(vllm_config: Any, model_config: Any | None) -> bool:
    """Whether `model_config` (or the one in `vllm_config` when None) is the speculative draft's.

    By identity, as vLLM 0.33.0 keeps the object through `replace()`, pickling and `deepcopy` of the whole
    configuration. The ngram, ngram_gpu and custom_class methods alias draft and target
    (vllm/config/speculative.py, 0.33.0), so an aliased target is never a draft.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return False
    config = model_config if model_config is not None else getattr(vllm_config, "model_config", None)
    return config is draft and config is not getattr(speculative, "target_model_config", None)
