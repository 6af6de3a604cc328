"""Find and load the compiled FP8 expert kernel, the CUDA implementation of `drafttools::fp8_experts`.

Without it the operator still works on the CPU (`drafttools.experts.op`).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from pathlib import Path

from drafttools.errors import DraftToolsError

LIBRARY = Path(__file__).resolve().parent / "fp8_experts.so"
OLDEST_TORCH = (2, 10)  # the library is built against the stable ABI of this release


def load(library: Path = LIBRARY) -> None:
    """Register the CUDA implementation with torch; a second call does nothing.

    Raises:
        DraftToolsError: the library is missing or does not load, torch is too old, or there is no NVIDIA driver.
    """
    reason = unavailable(library)
    if reason:
        raise DraftToolsError(reason)
    import torch

    import drafttools.experts.op  # noqa: F401  (defines the schema that the library implements)

    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise DraftToolsError(f"the FP8 expert kernel {library} does not load: {error}") from error


def unavailable(library: Path = LIBRARY) -> str | None:
    """Why the kernel cannot be used on this machine, in one sentence; None if nothing stands in its way.

    Asks without importing torch, which takes seconds.
    """
    if not library.is_file():
        return f"the FP8 expert kernel is not built ({library} is missing): run python -m drafttools.experts.build"
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "the FP8 expert kernel needs torch, which is not installed"
    if tuple(int(part) for part in torch_version.split(".")[:2]) < OLDEST_TORCH:
        return f"the FP8 expert kernel needs torch 2.10 or newer, this is {torch_version}"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the FP8 expert kernel needs an NVIDIA driver, and libcuda.so.1 does not load here"
    return None
