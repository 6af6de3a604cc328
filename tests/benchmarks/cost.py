"""What the shim costs, as times and ratios from one run.

    python -m tests.benchmarks.cost

Each pair is measured in turns, so that a loaded machine loads both; the figures are medians. The quick-reduce check is
the real method of the installed vLLM's QuickAllReduce, stock and gated, outside the scope (the target's path).
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.processes import environment

Run = Callable[[], float]


@dataclass(frozen=True)
class Cost:
    """Medians in seconds of one thing without and with drafttools."""

    name: str
    without: float
    with_it: float

    @property
    def added(self) -> float:
        return self.with_it - self.without

    @property
    def ratio(self) -> float:
        return self.with_it / self.without


def in_turns(name: str, without: Run, with_it: Run, rounds: int) -> Cost:
    """Medians of `rounds` measurements of each, taken in turns."""
    without(), with_it()  # warm up
    pairs = [(without(), with_it()) for _ in range(rounds)]
    return Cost(name, *(statistics.median(side) for side in zip(*pairs, strict=True)))


def interpreter(code: str) -> Run:
    """Processor seconds of a fresh interpreter that runs `code`: the wall clock of a busy machine says little."""

    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return run


def start(rounds: int = 15) -> Cost:
    """A bare interpreter start, and one that imports drafttools."""
    return in_turns("interpreter start", interpreter("pass"), interpreter("import drafttools"), rounds)


def calls(statement: Callable[[], Any], number: int = 20000) -> Run:
    """Seconds of one call, the smallest of three batches: interruptions only add."""
    return lambda: min(timeit.repeat(statement, number=number, repeat=3, timer=time.process_time)) / number


def slowness() -> float:
    """How many times longer a call of an empty function takes here than the 40 ns the bounds allow for, at least 1."""
    return max(1.0, calls(lambda: None)() / 40e-9)


def scope(rounds: int = 7) -> Cost:
    """Entering and leaving a context manager that does nothing, and the draft scope."""
    from drafttools.scope import draft_model_scope

    class Nothing:
        __slots__ = ()

        def __enter__(self) -> None: ...

        def __exit__(self, *exc: object) -> None: ...

    def nothing() -> None:
        with Nothing():
            pass

    def draft() -> None:
        with draft_model_scope():
            pass

    return in_turns("scope enter and exit", calls(nothing), calls(draft), rounds)


def quick_reduce(rounds: int = 7) -> Cost:
    """The target's question to quick reduce, where it answers True: stock and gated."""
    import torch
    from vllm.distributed.device_communicators import quick_all_reduce as module

    from drafttools.patches import quick_reduce as patch
    from drafttools.patching import Transaction
    from tests.unit.effects import quick_all_reduce

    communicator, tensor = quick_all_reduce(), torch.zeros(4096, dtype=torch.bfloat16)
    stock, transaction = module.QuickAllReduce.should_quick_allreduce, Transaction()
    patch.PATCH.apply(transaction, module)
    gate = module.QuickAllReduce.should_quick_allreduce
    transaction.roll_back()
    assert gate is not stock
    assert gate(communicator, tensor) is True
    return in_turns(
        "quick-reduce check",
        calls(lambda: stock(communicator, tensor)),
        calls(lambda: gate(communicator, tensor)),
        rounds,
    )


def measure() -> list[Cost]:
    return [start(), scope(), quick_reduce()]


def main() -> None:
    print(f"{'':22}{'without':>12}{'with':>12}{'added':>12}{'ratio':>8}")
    for cost in measure():
        times = "".join(f"{value * 1e6:>10.2f}us" for value in (cost.without, cost.with_it, cost.added))
        print(f"{cost.name:22}{times}{cost.ratio:>8.2f}")


if __name__ == "__main__":
    os.environ["DRAFTTOOLS"] = "off"
    main()
