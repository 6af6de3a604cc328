"""Let the applied patches join vLLM's compile-cache key."""

from __future__ import annotations

import hashlib
from types import ModuleType

from drafttools import settings
from drafttools.patching import Patch, Seam, Transaction

VARIABLE = "VLLM_DRAFTTOOLS_FINGERPRINT"


def fingerprint() -> str:
    """Hash of the version, the mode and the patches that are switched on; the same in every process of every host."""
    import drafttools
    from drafttools import patches

    names = sorted({patch.name for patch in patches.ALL} - settings.disabled())
    text = "\n".join([drafttools.__version__, settings.mode() or "off", *names])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _apply(transaction: Transaction, module: ModuleType) -> None:
    value = fingerprint()
    transaction.add_item(module.environment_variables, VARIABLE, lambda: value)


PATCH = Patch(
    name="compile_cache",
    module="vllm.envs",
    seams=(Seam("compile_factors", features=("environment_variables",)),),
    what=f"Registers `{VARIABLE}` with vLLM, whose value is a fingerprint of the patches that are switched on.",
    why="vLLM's cache key is built from its registered variables and its configuration; without this a graph compiled "
    "without the patches could be served to a run with them, and the other way round.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/envs.py",
    retire="When vLLM offers plugins a documented way to join the cache key.",
    apply=_apply,
    native=(),
    roles=("worker", "engine_core", "api_server"),
)
