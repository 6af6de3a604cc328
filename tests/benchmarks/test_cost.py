"""The bounds on what the shim costs, in processor time and with room for a busy machine."""

from __future__ import annotations

import pytest

from tests.benchmarks import cost

SLACK = 2  # other processes take caches and turbo clocks away, which processor time does not show


def test_import_is_cheap() -> None:
    """Under 30 ms, and under half of a bare interpreter start."""
    start = cost.start(rounds=11)
    assert start.added < 0.5 * start.without
    assert start.added < 0.030 * SLACK * cost.slowness()


def test_scope_is_cheap() -> None:
    """Under a microsecond."""
    assert cost.scope(rounds=5).with_it < 1e-6 * SLACK * cost.slowness()


@pytest.mark.vllm
def test_quick_reduce_check_is_cheap() -> None:
    """Under 0.2 us more than stock."""
    pytest.importorskip("vllm")
    assert cost.quick_reduce(rounds=5).added < 0.2e-6 * SLACK * cost.slowness()
