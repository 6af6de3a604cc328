"""One verdict over all processes of a run, from their reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttools import attest


@dataclass(frozen=True)
class Status:
    """The merged reports: `in_effect` only if every worker that built a draft is, and all workers reported."""

    reports: list[dict[str, Any]]
    problems: list[str]

    @property
    def in_effect(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """The whole as one object."""
        return {"in_effect": self.in_effect, "problems": self.problems, "reports": self.reports}


def merge(directory: Path) -> Status:
    """Judge the latest run in `directory`. Raises DraftToolsError for reports that cannot be read."""
    reports = attest.read(directory)
    workers = [report for report in reports if report["role"] == "worker" and report["world_size"] is not None]
    problems = _missing_workers(workers)
    if not any(report["drafts"] for report in workers):
        problems.append("no worker reported a draft model")
    for report in workers:
        if report["drafts"]:
            problems += [f"rank {report['rank']} (pid {report['pid']}): {p}" for p in attest.problems(report)]
    return Status(reports, problems)


def _missing_workers(workers: list[dict[str, Any]]) -> list[str]:
    if not workers:
        return ["no worker reported: the process that loads the models was not reached"]
    world = max(report["world_size"] for report in workers)
    if len(workers) >= world:
        return []
    # Data-parallel engines of their own count ranks from 0 each, so ranks only name who is missing.
    absent = [str(rank) for rank in range(world) if rank not in {report["rank"] for report in workers}]
    return [f"{world - len(workers)} of {world} workers did not report (rank {', '.join(absent)})"]
