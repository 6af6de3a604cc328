"""Activation: wait for vLLM with a standard-library finder, and only then bring in the patches.

`import drafttools` runs in every Python process of a container, so this module imports nothing heavy and cannot
raise in a process that never imports vLLM.
"""

from __future__ import annotations

import os
import sys

from drafttools import settings

TYPE_CHECKING = False  # the import of typing took 3 of the 8 ms that this package took
if TYPE_CHECKING:
    from typing import Any


class _VllmFinder:
    """Lends `vllm` a loader that installs the patches just before the package runs.

    Only running vLLM counts: other packages look it up to see whether it is there. Look-ups of vLLM's modules retry
    patches whose module was still initialising.
    """

    def __init__(self) -> None:
        self._busy = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if self._busy or target is not None or not fullname.startswith("vllm"):
            return None
        self._busy = True
        try:
            if fullname == "vllm":
                return _with_our_loader(fullname)
            if fullname.startswith("vllm."):
                _refresh()
        finally:
            self._busy = False
        return None


def _refresh() -> None:
    """Retry pending patches, unless another thread is still importing the engine.

    Finders run under Python's global import lock, so waiting for that thread would be for ever.
    """
    engine = sys.modules.get("drafttools.engine")
    if engine is not None and not getattr(engine.__spec__, "_initializing", False):
        engine.refresh()


def _with_our_loader(fullname: str) -> Any:
    from importlib.util import find_spec

    spec = find_spec(fullname)
    if spec is not None and spec.loader is not None:
        spec.loader = _FirstLoader(spec.loader)  # type: ignore[assignment]
    return spec


class _FirstLoader:
    """The package's own loader, except that it lets drafttools in first."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        from drafttools import engine

        engine.vllm_is_being_imported()
        self._loader.exec_module(module)


_finder = _VllmFinder()
_hook = ""


def activate() -> None:
    """Set the import hook, and the environment that child processes need. Idempotent.

    Nothing happens under DRAFTTOOLS=off. A bad DRAFTTOOLS value is raised as DraftToolsError when vLLM is imported,
    never before: a process that is not vLLM must not notice.
    """
    if os.environ.get(settings.MODE, "").strip().lower() == "off":
        return
    settings.prepare_children(os.environ, mode="enforce", way_in="import")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)  # type: ignore[arg-type]
    global _hook
    _hook = _hook or _hook_from_environment()
    if "vllm" in sys.modules:
        from drafttools import engine

        engine.vllm_is_being_imported()


def reached_by() -> str:
    """The mechanism that activated drafttools in this process: `import`, `sitecustomize` or `plugin`."""
    return _hook


def _hook_from_environment() -> str:
    """sitecustomize and the plugin leave their mark together with the pid, so that a child does not inherit it."""
    hook, _, pid = os.environ.get("DRAFTTOOLS_HOOK", "").partition(":")
    return hook if pid == str(os.getpid()) else "import"


def deactivate() -> list[str]:
    """Remove the import hook and undo every patch in this process; returns what could not be undone, and why.

    The environment is left as it is: processes started before still need it.
    """
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)  # type: ignore[arg-type]
    if "drafttools.engine" not in sys.modules:
        return []
    from drafttools import engine

    return engine.uninstall()
