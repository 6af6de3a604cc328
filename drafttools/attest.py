"""What this process did for its draft models: counters while it runs, one JSON report, and the reader for all of them.

Counting is a dictionary increment. The report is written atomically when something new happens, while the draft runs
ever less often, down to once in half a minute, and at exit; a directory that cannot be written never stops a server.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttools import activation, settings
from drafttools.errors import DraftToolsError
from drafttools.patching import Applied, State

SCHEMA = 1
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Evidence:
    """What a patch was seen doing for drafts: asked so often, and so often changed the answer (declined).

    A gate is asked only when stock would have lowered the draft's precision; a scope patch is asked on each entry.
    """

    __slots__ = ("asked", "declined")

    def __init__(self) -> None:
        self.asked = 0
        self.declined = 0


@dataclass
class Draft:
    """One draft model in this process."""

    class_name: str
    architecture: str
    checkpoint: str
    prefix: str
    dtypes: dict[str, int]
    quant_methods: dict[str, str]
    kv_cache_dtype: str
    shared_with_target: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=lambda: Counter(full=0, piecewise=0, breakable=0))
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "class": self.class_name,
            "architecture": self.architecture,
            "checkpoint": self.checkpoint,
            "prefix": self.prefix,
            "dtypes": self.dtypes,
            "quant_methods": self.quant_methods,
            "kv_cache_dtype": self.kv_cache_dtype,
            "shared_with_target": self.shared_with_target,
            "calls": dict(self.calls),
            "captures": dict(self.captures),
            "details": self.details,
        }


# Calls of each runner entry point in scope: (class of the proposer or speculator, method).
entry_points: dict[tuple[type, str], int] = {}

_evidence: dict[str, Evidence] = {}
_drafts: list[Draft] = []
_notes: list[str] = []
_ungated: list[str] = []
_failures: list[str] = []
_worker: dict[str, Any] = {}
_applied: dict[str, Applied] = {}
_pause = _FIRST_PAUSE_S
_next_write = 0.0
_complained = False


def evidence(name: str) -> Evidence:
    """The counters of a patch; the same object for the life of the process."""
    return _evidence.setdefault(name, Evidence())


def start(applied: dict[str, Applied]) -> None:
    """Begin reporting on these patches in this process."""
    global _applied
    _applied = applied
    atexit.register(write)
    _finalize_forked_children()
    write()


def note(sentence: str) -> None:
    """Add a sentence for the operator to this process's report."""
    if sentence not in _notes:
        _notes.append(sentence)


def worker_loaded(vllm_config: Any) -> None:
    """Record that this process loads models: it is a worker of a world of known size."""
    parallel = getattr(vllm_config, "parallel_config", None)
    if parallel is None:
        return
    _worker["world_size"] = getattr(parallel, "world_size_across_dp", None) or getattr(parallel, "world_size", 1)
    _worker["rank"] = _rank(parallel)
    write()


def reaches_draft(ungated: list[str], failures: list[str]) -> None:
    """Record the switches that reach the draft ungated, and the patches that should stand and do not."""
    _ungated.extend(sentence for sentence in ungated if sentence not in _ungated)
    _failures.extend(sentence for sentence in failures if sentence not in _failures)


def add_draft(draft: Draft) -> None:
    """Record a loaded draft."""
    _drafts.append(draft)
    write()


def count_captures(kind: str, number: int) -> None:
    """Count CUDA graphs of a kind (`full`, `piecewise`, `breakable`) captured for the draft of this process."""
    if _drafts and number:
        _drafts[-1].captures[kind] += number


def drafts() -> list[Draft]:
    """The drafts loaded in this process."""
    return _drafts


def entered(first: bool) -> None:
    """Write the report after a runner entry point was counted in `entry_points`, if it is the first or time is due."""
    global _pause
    if first:
        write()
    elif time.monotonic() >= _next_write:
        _pause = min(2 * _pause, _LONGEST_PAUSE_S)
        write()


def observed_state(item: Applied) -> State:
    """Applied becomes in effect once the patch was seen doing its job for a draft in this process."""
    seen = _evidence.get(item.patch.name)
    if item.state is State.APPLIED and seen is not None:
        done = seen.declined if item.patch.hazard is not None else seen.asked
        if done:
            return State.IN_EFFECT
    return item.state


def report() -> dict[str, Any]:
    """This process's report, schema 1."""
    gates = {name: item for name, item in _applied.items() if item.patch.hazard is not None}
    return {
        "schema": SCHEMA,
        "run": os.environ.get(settings.RUN_ID, ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "role": _role(),
        "rank": _worker.get("rank"),
        "world_size": _worker.get("world_size"),
        "way_in": os.environ.get(settings.WAY_IN, "plugin"),
        "hook": activation.reached_by(),
        "mode": settings.mode() or "off",
        "allow_unverified": settings.allow_unverified(),
        "written": time.time(),
        "drafttools_version": _own_version(),
        "vllm_version": _version("vllm"),
        "torch_version": _version("torch"),
        "patches": [
            {
                "name": name,
                "target": f"{item.patch.module}:{', '.join(seam.qualname for seam in item.patch.seams)}",
                "state": str(observed_state(item)),
                "reason": item.reason,
            }
            for name, item in _applied.items()
        ],
        "drafts": [draft.as_json() for draft in _drafts],
        "entry_points": {f"{cls.__name__}.{name}": count for (cls, name), count in entry_points.items()},
        "gates": {name: {"asked": evidence(name).asked, "declined": evidence(name).declined} for name in gates},
        "ungated": list(_ungated),
        "failures": list(_failures),
        "notes": list(_notes),
    }


def write() -> None:
    """Write the report, if a directory was asked for. Says so once when it cannot, and never raises for that."""
    global _next_write, _complained
    _next_write = time.monotonic() + _pause
    directory = os.environ.get(settings.REPORT_DIR)
    if not directory or not _applied:
        return
    path = Path(directory) / f"drafttools-{socket.gethostname()}-{os.getpid()}.json"
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(report()))
        os.replace(temporary, path)
    except (OSError, TypeError, ValueError) as error:
        if not _complained:
            _complained = True
            print(
                f"drafttools: cannot write the report {path}: {error}; set {settings.REPORT_DIR}",
                file=sys.stderr,
            )


def read(directory: Path) -> list[dict[str, Any]]:
    """The reports in a directory, of the latest run only.

    Raises DraftToolsError for a directory without reports, a truncated file, or another schema.
    """
    files = sorted(directory.glob("drafttools-*.json")) if directory.is_dir() else []
    if not files:
        raise DraftToolsError(f"{directory} holds no drafttools-*.json; pass the directory given to --report")
    reports = [_read_one(path) for path in files]
    latest = max(reports, key=lambda report: report["written"])["run"]
    return [report for report in reports if report["run"] == latest]


def _read_one(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DraftToolsError(f"{path} is not a complete report ({error}); remove it and run again") from None
    if not isinstance(loaded, dict) or loaded.get("schema") != SCHEMA:
        found = loaded.get("schema") if isinstance(loaded, dict) else None
        raise DraftToolsError(f"{path} has schema {found}, this drafttools reads schema {SCHEMA}; use the same version")
    missing = {"run", "role", "mode", "patches", "drafts", "gates", "written"} - loaded.keys()
    if missing:
        raise DraftToolsError(f"{path} lacks {', '.join(sorted(missing))}; remove it and run again")
    kinds = {"patches": list, "drafts": list, "gates": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(loaded[key], kind)]
    if wrong:
        raise DraftToolsError(f"{path} is no report: {', '.join(wrong)} is of another kind; remove it and run again")
    return loaded


def problems(report: dict[str, Any]) -> list[str]:
    """Why a worker that built a draft is not in effect; empty when it is."""
    found: list[str] = []
    if report["mode"] != "enforce":
        found.append(f"mode is {report['mode']}: nothing is gated")
    states = {patch["name"]: patch["state"] for patch in report["patches"]}
    if states.get("load_scope") != State.IN_EFFECT:
        found.append(f"load_scope is {states.get('load_scope', 'missing')}: no draft was seen loading in scope")
    if not any(report.get("entry_points", {}).values()):
        found.append("no runner entry point (propose, capture, dummy_run) ran in scope")
    for draft in report["drafts"]:
        if not draft["calls"]:
            found.append(f"draft {draft['class']} was built but never called")
    found += report.get("failures", [])
    for name, gate in report["gates"].items():
        if gate["asked"] != gate["declined"]:
            found.append(f"{name}: {gate['asked'] - gate['declined']} of {gate['asked']} reached the draft")
    return found


def forget_evidence() -> None:
    """Start counting anew: what was seen before is no evidence for patches applied from now on."""
    for seen in _evidence.values():
        seen.asked = seen.declined = 0


def after_fork() -> None:
    """A forked child starts its own report; what the parent saw is not the child's evidence."""
    global _pause, _next_write
    _pause, _next_write = _FIRST_PAUSE_S, 0.0
    forget_evidence()
    _drafts.clear()
    entry_points.clear()
    _worker.clear()
    _finalize_forked_children()


def _finalize_forked_children() -> None:
    """multiprocessing's children leave through os._exit, which skips atexit; its own finalizers do run."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, write, exitpriority=10)


def _role() -> str:
    if _worker:
        return "worker"
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", "") or ""
    if name.startswith("vllm.model_executor.models.registry"):
        return "registry"
    process = getattr(sys.modules.get("multiprocessing.process"), "current_process", None)
    process_name = str(getattr(process(), "name", "")) if process else ""
    if process_name.startswith("EngineCore"):
        return "engine_core"
    if process_name.startswith("ApiServer"):
        return "api_server"
    if process_name.startswith(("VllmWorker", "Worker")):
        return "worker"
    return "launcher" if process_name == "MainProcess" else "other"


def _rank(parallel: Any) -> int:
    """The global rank; inside a data-parallel group the replica's ranks follow each other."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(getattr(parallel, "rank", 0))


def _version(module: str) -> str | None:
    version = getattr(sys.modules.get(module), "__version__", None)
    return str(version) if version is not None else None


def _own_version() -> str:
    import drafttools

    return drafttools.__version__
