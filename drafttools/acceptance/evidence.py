"""What else a reviewer needs beside the number: the draft's stored and effective precision, modes and switches.

The effective side comes from the reports of the engine's processes (`status.merge`), the stored side from the JSON of
`drafttools audit CHECKPOINT --json`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttools.acceptance.records import Run
from drafttools.errors import DraftToolsError
from drafttools.status import Status, merge

NOT_TOLD = "not told"
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{7,40})")


@dataclass(slots=True)
class Evidence:
    """Reports of one engine run and the audit of one checkpoint, either possibly absent."""

    status: Status | None = None
    audit: dict[str, Any] | None = None

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports of all processes."""
        return self.status.reports if self.status else []

    def problems(self) -> list[str]:
        """Why the draft's precision may explain a difference; empty when all that is here is clean."""
        found = list(self.status.problems) if self.status else []
        for report in self.with_drafts():
            found += [f"rank {report['rank']}: {sentence}" for sentence in report.get("ungated", [])]
        if self.audit is not None and self.audit["verdict"] not in ("ok", "fixed"):
            found.append(f"audit: {self.audit['verdict']}")
        return found

    def with_drafts(self) -> list[dict[str, Any]]:
        """The reports of processes that built a draft."""
        return [report for report in self.reports if report["drafts"]]


def load_evidence(report_dir: Path | None, audit: Path | None) -> Evidence:
    """Read what was given.

    Raises:
        DraftToolsError: a directory without complete reports, or a file that is not an audit.
    """
    return Evidence(merge(report_dir) if report_dir else None, _read_audit(audit) if audit else None)


def _read_audit(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
        loaded["verdict"], loaded["modules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftToolsError(
            f"{path}: not the JSON of an audit ({error!r}); save `drafttools audit CHECKPOINT --json`"
        ) from None
    return dict(loaded)


def explain_drop(evidence: Evidence) -> str:
    """What the evidence says about a fall in acceptance length."""
    if evidence.status is None and evidence.audit is None:
        return "whether draft precision explains it is open: give --report and --audit"
    if problems := evidence.problems():
        return f"draft precision may explain it: {'; '.join(problems)}"
    if evidence.status is None:
        return "not explained by draft precision, as far as the checkpoint goes: no report of the running engine"
    return "not explained by draft precision"


def checklist(evidence: Evidence, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The items a reviewer asks for, each with what is known or `not told`."""
    drafts = [draft for report in evidence.with_drafts() for draft in report["drafts"]]
    reports = evidence.reports
    return [
        ("draft checkpoint and revision", _checkpoints(drafts, runs)),
        ("stored precision (audit)", _stored(evidence.audit)),
        ("effective precision (report)", _join(_effective(draft) for draft in drafts)),
        ("draft KV cache", _join(str(draft.get("kv_cache_dtype", NOT_TOLD)) for draft in drafts)),
        ("mode and way in", _join(f"{report['mode']} by {report.get('way_in', '?')}" for report in reports)),
        ("patches", _join(f"{p['name']}: {p['state']}" for r in evidence.with_drafts() for p in r["patches"])),
        ("gates, declined of asked", _join(_gates(report) for report in evidence.with_drafts())),
        (
            "reaching the draft ungated",
            _join(n for r in reports for n in r.get("ungated", [])) if reports else NOT_TOLD,
        ),
        ("unverified allowed", _join(str(report.get("allow_unverified", NOT_TOLD)) for report in reports)),
        ("versions", _join(_versions(report) for report in reports)),
        ("k", _settings(runs, "k")),
        ("rejection sampling", _settings(runs, "rejection_sample_method")),
        ("draft sampling", _settings(runs, "draft_sample_method")),
        ("sampling", _settings(runs, "sampling")),
    ]


def _join(parts: Iterable[str]) -> str:
    """Distinct parts in order."""
    return "; ".join(dict.fromkeys(part for part in parts if part)) or NOT_TOLD


def _checkpoints(drafts: Sequence[dict[str, Any]], runs: Sequence[Run]) -> str:
    names = [str(draft["checkpoint"]) for draft in drafts]
    names += [str(run.config["draft_model"]) for run in runs if "draft_model" in run.config]
    return _join(_with_revision(name) for name in names)


def _with_revision(name: str) -> str:
    """A path into the Hugging Face cache as repository @ revision; anything else as it is."""
    match = _SNAPSHOT.search(name)
    return f"{match[1].replace('--', '/')} @ {match[2]}" if match else name


def _stored(audit: dict[str, Any] | None) -> str:
    if audit is None:
        return NOT_TOLD
    formats = Counter(str(module.get("stored")) for module in audit["modules"] if module.get("draft"))
    counts = ", ".join(f"{name} x {count}" for name, count in sorted(formats.items()))
    return f"{counts or 'no draft modules'} (verdict {audit['verdict']})"


def _effective(draft: dict[str, Any]) -> str:
    dtypes = ", ".join(f"{dtype} {count:,}" for dtype, count in sorted(draft["dtypes"].items()))
    methods = Counter(draft["quant_methods"].values())
    return f"{draft['class']}: {dtypes} parameters; " + ", ".join(f"{m} x {n}" for m, n in sorted(methods.items()))


def _gates(report: dict[str, Any]) -> str:
    return ", ".join(f"{name} {gate['declined']}/{gate['asked']}" for name, gate in report["gates"].items())


def _versions(report: dict[str, Any]) -> str:
    names = ("drafttools", "vllm", "torch")
    return ", ".join(f"{name} {report.get(f'{name}_version') or NOT_TOLD}" for name in names)


def _settings(runs: Sequence[Run], name: str) -> str:
    values = [run.config.get(name) for run in runs]
    if name == "k":
        values += [run.pool.k for run in runs]
    return _join(str(value) for value in values if value is not None)
