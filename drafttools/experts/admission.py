"""Whether a draft's experts may be kept in FP8: every condition is looked at, and one error lists all that fail."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drafttools.errors import DraftToolsError

OPTION = "mtp_expert_quantization"
UNSUPPORTED = "DRAFTTOOLS_FP8_EXPERTS_UNSUPPORTED"
ARCHITECTURE = "Qwen4ExpMTP"
CAPABILITY = (7, 0)
HIDDEN_MULTIPLE = 128
LOCAL_MULTIPLE = 16

Route = Literal["online", "native"]


@dataclass(frozen=True)
class Facts:
    """What the decision rests on.

    Attributes:
        platform: "cuda", "rocm", "cpu" or another vLLM platform name.
        capability: CUDA compute capability, None elsewhere.
        dtype: execution dtype as torch prints it, without "torch.".
        architecture: the draft's architecture.
        parallel: vLLM's parallel sizes and switches that are not plain tensor parallelism, as "name=value".
        pipeline_parallel_size: ranks the target's layers are spread over.
        rejection_sampling: vLLM's rejection_sample_method.
        hidden_size: H.
        local_intermediate: I of one rank.
        no_kernel: why the operator cannot run on the device; empty when it can.
        route: where the FP8 bytes come from.
    """

    platform: str
    capability: tuple[int, int] | None
    dtype: str
    architecture: str
    parallel: tuple[str, ...]
    pipeline_parallel_size: int
    rejection_sampling: str
    hidden_size: int
    local_intermediate: int
    no_kernel: str
    route: Route


def overridden(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the developer override lifts the platform, dtype and architecture conditions."""
    return environ.get(UNSUPPORTED, "") == "1"


def unmet(facts: Facts, override: bool = False) -> list[str]:
    """The conditions that do not hold, one phrase each; empty when the experts may be kept in FP8."""
    found = [] if override else _unvalidated(facts)
    if facts.no_kernel:
        found.append(facts.no_kernel)
    if facts.parallel:
        found.append(f"only tensor parallelism is supported, not {', '.join(facts.parallel)}")
    if facts.route == "online" and facts.pipeline_parallel_size > 1:
        found.append(
            f"pipeline_parallel_size={facts.pipeline_parallel_size} needs experts that are FP8 in the checkpoint"
        )
    if facts.rejection_sampling != "standard":
        found.append(f"rejection_sample_method must be standard, not {facts.rejection_sampling}")
    if facts.hidden_size % HIDDEN_MULTIPLE:
        found.append(f"hidden size {facts.hidden_size} is not a multiple of {HIDDEN_MULTIPLE}")
    if facts.local_intermediate % LOCAL_MULTIPLE:
        found.append(f"expert width {facts.local_intermediate} of a rank is not a multiple of {LOCAL_MULTIPLE}")
    return found


def _unvalidated(facts: Facts) -> list[str]:
    """What the override lifts."""
    found: list[str] = []
    if facts.platform != "cuda":
        found.append(f"the platform must be CUDA, not {facts.platform}")
    elif facts.capability != CAPABILITY:
        shown = ".".join(map(str, facts.capability)) if facts.capability else "unknown"
        found.append(f"the compute capability must be 7.0, not {shown}")
    if facts.dtype != "float16":
        found.append(f"the execution dtype must be float16, not {facts.dtype}")
    if facts.architecture != ARCHITECTURE:
        found.append(f"the draft architecture must be {ARCHITECTURE}, not {facts.architecture or 'unknown'}")
    return found


def admit(facts: Facts, layer: str, override: bool) -> None:
    """Raise DraftToolsError listing every unmet condition, or return."""
    failed = unmet(facts, override)
    if failed:
        raise DraftToolsError(
            f"cannot keep the experts of {layer} in FP8: {'; '.join(failed)}. "
            f'Remove "{OPTION}" from --speculative-config, or change what is named'
        )


def facts_of(vllm_config: Any, moe_config: Any, route: Route, *, no_kernel: str) -> Facts:
    """Read the facts from vLLM's configuration of the draft, its FusedMoEConfig and the current platform."""
    from vllm.platforms import current_platform

    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    draft = speculative.draft_model_config
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    architectures = getattr(draft.hf_config, "architectures", None) or [""]
    return Facts(
        platform=_platform_name(current_platform),
        capability=(capability.major, capability.minor) if capability is not None else None,
        dtype=str(moe_config.in_dtype).removeprefix("torch."),
        architecture=str(architectures[0]),
        parallel=_not_tensor_parallel(parallel, moe_config),
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        rejection_sampling=str(getattr(speculative, "rejection_sample_method", "standard")),
        hidden_size=moe_config.hidden_dim,
        local_intermediate=moe_config.intermediate_size_per_partition,
        no_kernel=no_kernel,
        route=route,
    )


def _platform_name(platform: Any) -> str:
    for name in ("cuda", "rocm", "cpu", "xpu", "tpu"):
        if getattr(platform, f"is_{name}")():
            return name
    return str(getattr(platform, "device_name", "unknown"))


def _not_tensor_parallel(parallel: Any, moe_config: Any) -> tuple[str, ...]:
    moe = moe_config.moe_parallel_config
    found = []
    if parallel.enable_expert_parallel or moe.use_ep:
        found.append("enable_expert_parallel")
    if parallel.enable_eplb:
        found.append("enable_eplb")
    for name in ("data_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            found.append(f"{name}={size}")
    if moe.is_sequence_parallel:
        found.append("sequence-parallel experts")
    return tuple(found)
