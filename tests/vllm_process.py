"""The process behind `tests.processes.VllmProcess`: import vLLM once, then run each requested function in a fork.

Requests and replies are JSON, one a line, on stdin and the original stdout.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import sys
import traceback
from typing import Any, TextIO

TIMEOUT_S = 120

# Modules that bind what drafttools replaces by name, or subclass it: they are there before drafttools is activated.
BINDERS = (
    "vllm.compilation.decorators",
    "vllm.model_executor.layers.quantization.auto_awq",
    "vllm.model_executor.layers.quantization.auto_gptq",
    "vllm.model_executor.layers.quantization.fp8",
    "vllm.model_executor.layers.quantization.modelopt",
    "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4",
    "vllm.model_executor.layers.quantization.utils.marlin_utils_fp8",
    "vllm.model_executor.layers.fused_moe.experts.marlin_moe",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.tensorizer_loader",
)
FAMILIES = ("vllm.v1.spec_decode", "vllm.v1.worker.gpu.spec_decode")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints is no reply
    import_vllm()
    gc.collect()
    gc.freeze()  # vLLM's loaders and graph wrappers collect garbage, which takes a second with all of this on the heap
    for line in sys.stdin:
        reply(json.loads(line), replies)


def import_vllm() -> None:
    """Every module that a patch touches, and those around them."""
    define_torchvision_ops()
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # an unpacked wheel does not say what it was built for

    from drafttools import patches

    for name in {patch.module for patch in patches.ALL} | set(BINDERS) | set(family_modules()):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("vllm"):
                raise
    parse_vllm()


def parse_vllm() -> None:
    """Read vLLM's source where drafttools will look for it, so that no fork has to."""
    from drafttools import engine, patches
    from drafttools.patching import check

    tree = engine._vllm_tree()
    assert tree is not None
    for patch in patches.ALL:
        check(patch, tree)


def family_modules() -> list[str]:
    """Every module of the packages that hold proposers and speculators, as far as they import on a CPU."""
    found = []
    for package in FAMILIES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                importlib.import_module(module.name)
            except Exception as error:
                print(f"{module.name} does not import here: {error}", file=sys.stderr)
            else:
                found.append(module.name)
    return found


def define_torchvision_ops() -> None:
    """vLLM's transformers modules look for operators of torchvision, which has no build beside CPU torch."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # keeps the registration alive


def reply(request: dict[str, Any], replies: TextIO) -> None:
    """Run the request in a fork and send what it says, or why it said nothing."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        signal.alarm(TIMEOUT_S)
        with os.fdopen(send, "w") as out:
            json.dump(outcome(request), out)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as result:
        text = result.read()
    _, status = os.waitpid(child, 0)
    replies.write((text or json.dumps({"error": f"the fork ended with status {status}"})) + "\n")


def outcome(request: dict[str, Any]) -> dict[str, Any]:
    try:
        os.environ.update(request["environment"])
        module, _, qualname = request["function"].partition(":")
        function: Any = importlib.import_module(module)
        for name in qualname.split("."):
            function = getattr(function, name)
        import drafttools

        drafttools.activate()
        return {"result": function(*request["arguments"])}
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
