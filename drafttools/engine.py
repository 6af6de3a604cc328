"""The patches in this process: registered when vLLM is being imported, applied as its modules arrive."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from drafttools import attest, patches, settings
from drafttools.errors import DraftToolsError
from drafttools.patching import Applied, State, check
from drafttools.source import Tree

_applied: dict[str, Applied] = {}
_refreshing = threading.RLock()
_tree: Tree | None = None
_reload: Any = None
_late = False


def vllm_is_being_imported() -> None:
    """Register every patch on the first call; later calls retry modules that were still initialising.

    Raises DraftToolsError for a mode or a patch name that does not exist.
    """
    if not _applied:
        _register()
    refresh()


def applied() -> dict[str, Applied]:
    """What became of each patch in this process, by name."""
    return _applied


def state(name: str) -> State:
    """The state of one patch, as observed now."""
    return attest.observed_state(_applied[name])


def refusal(item: Applied) -> str:
    """Why a patch does not stand, or will not once its module is imported; empty when it does."""
    if item.state is State.REFUSED:
        return item.reason
    tree = _vllm_tree()
    if item.state is State.REGISTERED and tree is not None:
        verdict = check(item.patch, tree)
        return verdict.reason if verdict.state == State.REFUSED else ""
    return ""


def refresh(finished: str = "") -> None:
    """Apply what can be applied now; also after reloads, retried imports and late activation.

    While another thread does, nothing: waiting for it could mean waiting for an import that waits for this one.
    """
    tree = _vllm_tree()
    if _late or tree is None or not _refreshing.acquire(blocking=False):
        return
    try:
        for item in list(_applied.values()):
            item.try_apply(tree, finished=item.patch.module == finished)
    finally:
        _refreshing.release()


def uninstall() -> list[str]:
    """Undo every patch and the draft modules' scope; returns what could not be undone."""
    global _reload
    from drafttools import drafts, scope

    failed = [sentence for item in reversed(_applied.values()) for sentence in item.undo()]
    failed += drafts.unmark_all()
    scope.stop_delegating()
    if _reload is not None and importlib.reload is _reload:
        importlib.reload = vars(importlib)["reload"].__wrapped__
    _reload = None
    attest.write()
    attest.forget_evidence()
    _applied.clear()
    return failed


def _register() -> None:
    mode = settings.mode()
    if mode not in ("enforce", "observe"):
        return
    if find_spec("wrapt") is None:
        raise DraftToolsError("wrapt is not installed in this interpreter; pip install wrapt, or set DRAFTTOOLS=off")
    disabled = settings.disabled()
    unknown = disabled - {patch.name for patch in patches.ALL}
    if unknown:
        known = ", ".join(patch.name for patch in patches.ALL)
        raise DraftToolsError(f"{settings.DISABLE} names no such patch: {', '.join(sorted(unknown))}; known: {known}")
    items = {patch.name: Applied(patch) for patch in patches.ALL}
    for name in disabled:
        items[name].state, items[name].reason = State.DISABLED, f"switched off by {settings.DISABLE}"
    global _late
    _late = _too_late()
    if _late:
        for item in items.values():
            item.state = State.REFUSED
            item.reason = "activated after vLLM had compiled a model; import drafttools before vLLM loads one"
        attest.note("activated too late: vLLM had already compiled a model, nothing was patched")
    _applied.update(items)
    attest.start(_applied)
    _hook_imports()


def _hook_imports() -> None:
    global _reload
    import wrapt

    for name in {patch.module for patch in patches.ALL}:
        if name not in sys.modules:
            wrapt.register_post_import_hook(_import_hook(name), name)
    # wrapt's import hooks do not survive a reload, so look again after one.
    _reload = wrapt.FunctionWrapper(importlib.reload, _after_reload)
    importlib.reload = _reload


def _import_hook(name: str) -> Callable[[ModuleType], None]:
    def loaded(_: ModuleType) -> None:
        refresh(finished=name)

    return loaded


def _after_reload(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    module = wrapped(*args, **kwargs)
    refresh()
    return module


def _vllm_tree() -> Tree | None:
    global _tree
    spec = getattr(sys.modules.get("vllm"), "__spec__", None)
    locations = list(getattr(spec, "submodule_search_locations", None) or [])
    if not locations:
        return None
    if _tree is None or str(_tree.root) != locations[0]:
        _tree = Tree(Path(locations[0]))
    return _tree


def _too_late() -> bool:
    """Whether a model was compiled before us: vLLM drops guards, so such graphs would never see the patches."""
    counter = getattr(sys.modules.get("vllm.compilation.counter"), "compilation_counter", None)
    return getattr(counter, "num_models_seen", 0) > 0


def _forget_after_fork() -> None:
    attest.after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)
