"""What the engine tests share: checkpoints, and a directory for each engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from tests.engine import tiny_checkpoints

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoints")
    for make in (tiny_checkpoints.llama, tiny_checkpoints.qwen3, tiny_checkpoints.deepseek_mtp):
        make(directory)
    return directory


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("engines")
    return lambda name: root / name
