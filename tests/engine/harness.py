"""Run one engine in a subprocess and collect everything it says: tokens, counters, drafttools reports, probe counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import serve

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).parent / "probe"
TIMEOUT_S = 600


@dataclass
class Served:
    """What one engine run produced."""

    tokens: list[list[int]]
    logprobs: list[list[str]]
    metrics: dict[str, float]
    reports: Path
    probe: dict[str, Counter[str]]
    log: str


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without drafttools in it, set up for a small CPU engine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTTOOLS") and k != "PYTHONPATH"}
    kept.pop("VLLM_PLUGINS", None)
    return {
        **kept,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(PROBE), str(ROOT)]),
        **extra,
    }


def engine(
    directory: Path,
    options: dict[str, Any],
    *,
    target_layers: int,
    prefix: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    expect_failure: bool = False,
    **extra: str,
) -> Served:
    """Serve in a subprocess; `prefix` is put before the Python command, `extra` into its environment."""
    reports, probe = directory / "reports", directory / "probe"
    command = [
        *prefix,
        sys.executable,
        "-m",
        "tests.engine.serve",
        json.dumps({"gpu_memory_utilization": 0.2, **options}),
    ]
    environ = environment(
        DRAFTTOOLS_REPORT_DIR=str(reports),
        SCOPE_PROBE=str(probe),
        SCOPE_PROBE_TARGET_LAYERS=str(target_layers),
        VLLM_CACHE_ROOT=extra.pop("VLLM_CACHE_ROOT", str(directory.parent / "cache")),
        **extra,
    )
    done = subprocess.run(
        [*command, *flags], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    log = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(serve.MARK)]
    if expect_failure:
        assert done.returncode != 0, log[-4000:]
        return Served([], [], {}, reports, {}, log)
    assert done.returncode == 0, log[-4000:]
    assert lines, log[-4000:]
    served = json.loads(lines[-1].removeprefix(serve.MARK))
    return Served(served["tokens"], served["logprobs"], served["metrics"], reports, _probe_counts(probe), log)


def _probe_counts(directory: Path) -> dict[str, Counter[str]]:
    total: dict[str, Counter[str]] = {}
    for path in directory.glob("probe-*.json"):
        for kind, counts in json.loads(path.read_text()).items():
            total.setdefault(kind, Counter()).update(counts)
    return total


def status(directory: Path) -> tuple[int, str]:
    """Exit code and output of `drafttools status`."""
    command = [sys.executable, "-m", "drafttools.cli", "status", str(directory)]
    done = subprocess.run(
        command, env=environment(DRAFTTOOLS="off"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr
