"""What was asked and what was lowered, in the target and in the draft."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from typing import Any

TARGET_FORWARD = "_model_forward"
DRAFT_MODULE = os.path.join("vllm", "v1", "spec_decode", "llm_base_proposer.py")


class Counts:
    """Counts per place (``target``, ``draft``, ``other``). Written at every change: workers are killed at the end."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.counts = {where: {"forwards": 0, "asked": 0, "lowered": 0} for where in ("target", "draft", "other")}

    def add(self, where: str, what: str) -> None:
        self.counts[where][what] += 1
        self.path.write_text(json.dumps(self.counts))

    def asked(self, lowered: bool) -> None:
        """Count one place at which precision may be lowered, and whether it was."""
        where = place()
        self.add(where, "asked")
        if lowered:
            self.add(where, "lowered")

    def count_forwards(self) -> None:
        """Count the target's forwards."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        forward = getattr(GPUModelRunner, TARGET_FORWARD)

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.add("target", "forwards")
            return forward(*args, **kwargs)

        setattr(GPUModelRunner, TARGET_FORWARD, counted)


def place() -> str:
    """Who is calling: ``target``, ``draft`` or ``other``."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code.co_filename.endswith(DRAFT_MODULE):
            return "draft"
        if frame.f_code.co_name == TARGET_FORWARD:
            return "target"
    return "other"
