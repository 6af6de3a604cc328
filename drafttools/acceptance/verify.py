"""Two runs of the same prompts, without and with the shim, held against each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttools.acceptance.flags import is_synthetic_config
from drafttools.acceptance.records import Rules
from drafttools.acceptance.sources import read
from drafttools.acceptance.summary import summarize
from drafttools.bootstrap import launcher
from drafttools.errors import DraftToolsError
from drafttools.status import Status, merge

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the sky is blue.",
    "def fibonacci(n):",
    "List ten rivers and the countries that they flow through.",
    "Translate into French: The meeting has been moved to Thursday afternoon.",
    "Solve step by step: a train covers 180 km in 2.5 hours; what is its speed?",
    "Summarize the causes of the First World War in five sentences.",
    "Write a SQL query that finds the three customers with the largest orders.",
)
LOG_TAIL_CHARACTERS = 300


@dataclass(slots=True)
class Served:
    """One engine run: its tokens, its acceptance, and the last words of its log where it failed."""

    mode: str
    token_ids: list[list[int]] | None
    tokens_per_second: float | None
    acceptance: dict[str, Any] | None
    failure: str | None = None


@dataclass(slots=True)
class Verification:
    """Both runs, the reports of the second, and whether the outputs had to agree."""

    off: Served
    on: Served
    status: Status | None
    greedy: bool

    @property
    def difference(self) -> str | None:
        """The first place where greedy outputs differ, or None."""
        if not self.greedy or self.off.token_ids is None or self.on.token_ids is None:
            return None
        for request, (off, on) in enumerate(zip(self.off.token_ids, self.on.token_ids, strict=True)):
            if off != on:
                place = next(
                    (i for i, (a, b) in enumerate(zip(off, on, strict=False)) if a != b), min(len(off), len(on))
                )
                return f"request {request} differs from token {place} on"
        return None

    @property
    def problems(self) -> list[str]:
        """Why this is no proof; empty when the shim is in effect and the outputs agree."""
        found = [f"the engine failed with the shim: {self.on.failure}"] if self.on.failure else []
        if self.status is None:
            found.append("no report was written: the shim did not reach the engine's processes")
        else:
            found += self.status.problems
        if self.difference:
            found.append(f"greedy outputs differ: {self.difference}")
        return found

    def as_json(self) -> dict[str, Any]:
        """The whole as one object."""
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "outputs_compared": self.greedy and None not in (self.off.token_ids, self.on.token_ids),
            "off": _without_tokens(self.off),
            "on": _without_tokens(self.on),
            "status": self.status.as_json() if self.status else None,
        }


def _without_tokens(served: Served) -> dict[str, Any]:
    return {
        "mode": served.mode,
        "tokens_per_second": served.tokens_per_second,
        "acceptance": served.acceptance,
        "failure": served.failure,
    }


def verify(
    engine: dict[str, Any], prompts: Sequence[Any], sampling: dict[str, Any], report: Path | None, timeout_s: float
) -> Verification:
    """Start the engine twice and compare.

    Args:
        engine: arguments of `vllm.LLM`, among them `model` and `speculative_config`.
        prompts: what `LLM.generate` takes, the same for both runs.
        sampling: arguments of `SamplingParams`; outputs are compared when its temperature is 0.
        report: directory for the reports of the run with the shim; a temporary one if None.
        timeout_s: seconds for each run.

    Raises:
        DraftToolsError: the configuration chooses the acceptance itself, or the report directory cannot be written.
    """
    speculative = engine["speculative_config"]
    if is_synthetic_config(speculative) or any(name.startswith("synthetic_") for name in speculative):
        raise DraftToolsError("--speculative-config asks for synthetic acceptance, which proves nothing; leave it out")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        request = directory / "request.json"
        engine = {"disable_log_stats": False, "seed": 0, **engine}
        request.write_text(json.dumps({"engine": engine, "prompts": list(prompts), "sampling": sampling}))
        reports = report or directory / "reports"
        off = _serve("off", request, directory / "off.json", None, timeout_s)
        on = _serve("enforce", request, directory / "on.json", reports, timeout_s)
        return Verification(off, on, _status(reports), sampling.get("temperature") == 0)


def _serve(mode: str, request: Path, result: Path, reports: Path | None, timeout_s: float) -> Served:
    """Run one engine in a process of its own; its log is kept for the error it may end in."""
    command = [sys.executable, "-m", "drafttools.acceptance.serve_prompts", str(request), str(result)]
    environ = launcher.environment(mode, reports, dict(os.environ))
    log = result.with_suffix(".log")
    with log.open("wb") as out:
        try:
            code = subprocess.run(
                command, env=environ, stdout=out, stderr=out, timeout=timeout_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return Served(mode, None, None, None, f"no answer within {timeout_s:g} s")
    if code or not result.exists():
        return Served(mode, None, None, None, _last_error(log) or f"exit code {code}")
    served = json.loads(result.read_text())
    return Served(mode, served["token_ids"], served["output_throughput"], summarize(read(str(result), Rules())))


def _last_error(log: Path) -> str:
    """The last line of the log that names an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or [""])[-1][-LOG_TAIL_CHARACTERS:]


def _status(reports: Path) -> Status | None:
    return merge(reports) if any(reports.glob("drafttools-*.json")) else None
