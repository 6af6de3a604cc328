"""What the environment asks of drafttools. Standard library only; reading it is cheap."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from drafttools.errors import DraftToolsError

MODE = "DRAFTTOOLS"
REPORT_DIR = "DRAFTTOOLS_REPORT_DIR"
DISABLE = "DRAFTTOOLS_DISABLE"
ALLOW_UNVERIFIED = "DRAFTTOOLS_ALLOW_UNVERIFIED"
WAY_IN = "DRAFTTOOLS_WAY_IN"
RUN_ID = "DRAFTTOOLS_RUN_ID"

MODES = ("enforce", "observe", "off")

# vLLM copies VLLM_* to Ray workers and extends that list by these two (vllm/ray/ray_env.py, 0.33.0).
RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
RAY_NAMES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def mode(environ: Mapping[str, str] = os.environ) -> str | None:
    """`enforce`, `observe` or `off`; None when nobody asked.

    Raises DraftToolsError for another value.
    """
    value = environ.get(MODE, "").strip().lower()
    if not value:
        return None
    if value not in MODES:
        raise DraftToolsError(f"{MODE}={value!r} is not a mode; set it to one of {', '.join(MODES)}")
    return value


def disabled(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Names in DRAFTTOOLS_DISABLE, a comma-separated list of patches."""
    return frozenset(filter(None, (name.strip() for name in environ.get(DISABLE, "").split(","))))


def allow_unverified(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether hazards that cannot be gated are to be reported only, instead of stopping the load."""
    return environ.get(ALLOW_UNVERIFIED, "") == "1"


def inject_dir() -> str:
    """The directory whose `sitecustomize` activates drafttools in every Python process that has it on PYTHONPATH."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap", "inject")


def prepare_children(environ: MutableMapping[str, str], *, mode: str, way_in: str) -> None:
    """Set in `environ` what child processes (spawned workers, Ray actors, model inspection) need to follow."""
    for variable, value in ((MODE, mode), (WAY_IN, way_in)):
        if not environ.get(variable, "").strip():
            environ[variable] = value
    if RUN_ID not in environ:
        import time

        environ[RUN_ID] = f"{os.uname().nodename}-{os.getpid()}-{int(time.time())}"
    before = environ.get("PYTHONPATH", "")
    if inject_dir() not in before.split(os.pathsep):
        # An empty entry means the current directory, so the rest stays as it is.
        environ["PYTHONPATH"] = inject_dir() + (os.pathsep + before if before else "")
    for variable, item in ((RAY_PREFIXES, "DRAFTTOOLS"), (RAY_NAMES, "PYTHONPATH")):
        items = [i for i in environ.get(variable, "").split(",") if i]
        if item not in items:
            environ[variable] = ",".join([*items, item])
