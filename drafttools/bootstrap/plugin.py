"""The `vllm.general_plugins` entry point: inert unless DRAFTTOOLS asks.

vLLM swallows an error raised while a plugin is imported, but not one raised by the plugin function
(vllm/plugins/__init__.py, 0.33.0). So this module imports the standard library only, and the function raises.
"""

import os


def activate() -> None:
    """Activate drafttools in this vLLM process. Raises DraftToolsError for a request that cannot be honoured."""
    if os.environ.get("DRAFTTOOLS", "").strip().lower() in ("", "off"):
        return
    os.environ.setdefault("DRAFTTOOLS_WAY_IN", "plugin")
    from drafttools import activation

    activation.activate("plugin", hook="plugin")
