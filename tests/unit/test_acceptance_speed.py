"""A large log is read fast and in little memory.

The suite reads 50 MB; the full size is `python tests/unit/test_acceptance_speed.py --megabytes 1000`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

BYTES_PER_SECOND = 50_000_000
PEAK_BYTES = 200_000_000

CHILD = """
import json, re, sys, time
from pathlib import Path
from drafttools.acceptance.records import Rules
from drafttools.acceptance.sources import read
from drafttools.acceptance.summary import summarize
start, cpu = time.perf_counter(), time.process_time()
run = summarize(read(sys.argv[1], Rules()))
# ru_maxrss would count the process that started this one.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, "run": run}))
"""

TAG = "(APIServer pid=7) "
ACCESS = TAG + 'INFO:     127.0.0.1:51234 - "POST /v1/completions HTTP/1.1" 200 OK\n'
ENGINE = (
    TAG + "INFO 10-01 12:00:10 [loggers.py:335] Engine 000: Avg prompt throughput: 12.0 tokens/s, Avg generation "
    "throughput: 300.1 tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.2%\n"
)
REQUEST = (
    TAG + "INFO 10-01 12:00:10 [logger.py:42] Received request cmpl-1: prompt: '{}', params: SamplingParams(n=1, "
    "temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None), prompt_token_ids: None\n"
)
SPEC = (
    TAG + "INFO 10-01 12:00:10 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {:.2f}, Accepted "
    "throughput: 1.00 tokens/s, Drafted throughput: 1.00 tokens/s, Accepted: {} tokens, Drafted: {} tokens, "
    "Per-position acceptance rate: {}, Avg Draft acceptance rate: 50.0%\n"
)


def spec_line(drafts: int, positions: list[int]) -> str:
    """One line of the present format for these counts."""
    accepted = sum(positions)
    rates = ", ".join(f"{count / drafts:.3f}" for count in positions)
    return SPEC.format(1 + accepted / drafts, accepted, drafts * len(positions), rates)


def write_log(path: Path, megabytes: int) -> int:
    """Write a log with one metrics line in forty (busy servers have one in hundreds); how many of them it holds."""
    rng = random.Random(0)
    block = []
    for _ in range(500):
        positions = sorted((rng.randrange(100, 900) for _ in range(3)), reverse=True)
        block += [ENGINE, spec_line(900, positions), REQUEST.format("word " * rng.randrange(200))]
        block += [ACCESS] * 37
    data = "".join(block).encode()
    times = -(-megabytes * 1_000_000 // len(data))
    with path.open("wb") as file:
        for _ in range(times):
            file.write(data)
    return 500 * times


def measure(megabytes: int) -> dict[str, float]:
    """Read a generated log in a process of its own; seconds, bytes per second of processor time, peak bytes.

    Reading has one thread: on an idle machine its processor time is the time it takes, on a busy one it is the
    steadier figure.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "server.log"
        lines = write_log(path, megabytes)
        size = path.stat().st_size
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=300, check=True
        )
    result = json.loads(done.stdout)
    assert result["run"]["intervals"] == lines
    assert result["run"]["drafts"] == 900 * lines
    return {"bytes": size, "seconds": result["seconds"], "rate": size / result["cpu"], "peak": result["peak"]}


def test_rate_and_memory() -> None:
    found = measure(50)
    assert found["rate"] > BYTES_PER_SECOND
    assert found["peak"] < PEAK_BYTES


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1000)
    found = measure(parser.parse_args().megabytes)
    print(
        f"{found['bytes'] / 1e6:.0f} MB in {found['seconds']:.1f} s, "
        f"{found['rate'] / 1e6:.0f} MB per processor second, peak {found['peak'] / 1e6:.0f} MB"
    )
    sys.exit(found["rate"] < BYTES_PER_SECOND or found["peak"] > PEAK_BYTES)
