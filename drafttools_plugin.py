"""The `vllm.general_plugins` entry point: inert unless DRAFTTOOLS asks.

A module of its own, because importing the package drafttools activates it. vLLM swallows an error raised while a
plugin is imported, but not one raised by the plugin function (vllm/plugins/__init__.py, 0.33.0): so this imports the
standard library only, and the function raises.
"""

import os


def activate() -> None:
    """Activate drafttools in this vLLM process. Raises DraftToolsError for a request that cannot be honoured."""
    if os.environ.get("DRAFTTOOLS", "").strip().lower() in ("", "off"):
        return
    os.environ.setdefault("DRAFTTOOLS_WAY_IN", "plugin")
    os.environ["DRAFTTOOLS_HOOK"] = f"plugin:{os.getpid()}"
    import drafttools

    drafttools.activate()
