"""Which draft layers keep their experts in FP8, and by which route."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from drafttools.errors import DraftToolsError
from drafttools.experts import admission
from drafttools.experts.admission import CAPABILITY, OPTION, Route
from drafttools.formats import Format, NoHeadersError, Stored, read_checkpoint, read_config
from drafttools.routing import Source, source_of

_SCALES = ("weight_scale_inv", "weight_scale", "scale")


def choose(prefix: str, moe_config: Any, stock: Callable[[], Any]) -> Any:
    """The quantization method of a draft's RoutedExperts: FP8-resident if asked for or stored so, else stock's.

    `stock()` is asked only when its answer is needed: on compute capability 7.0 vLLM cannot even build its own
    block-FP8 method.

    Raises:
        DraftToolsError: FP8 was asked for, or is what the checkpoint holds on compute capability 7.0, and cannot be
            had; the message lists every reason.
    """
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    vllm_config = get_current_vllm_config()
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "mtp":
        return stock()
    asked = getattr(speculative, OPTION, None) == "fp8"
    only_way = current_platform.is_cuda() and current_platform.get_device_capability() == CAPABILITY
    if not asked and not only_way:
        return stock()
    stored, scale = stored_experts(speculative, prefix)
    route = _route(stored)
    if not asked and route != "native":
        return stock()
    if route is None:
        raise DraftToolsError(
            f"cannot keep the experts of {prefix} in FP8: the checkpoint holds {stored.format} "
            f'({stored.note or stored.dtype}). Remove "{OPTION}" from --speculative-config'
        )
    override = admission.overridden()
    facts = admission.facts_of(vllm_config, moe_config, route, no_kernel=no_kernel(moe_config.device))
    admission.admit(facts, prefix, override)
    from drafttools.experts.method import Fp8ExpertsMethod

    return Fp8ExpertsMethod(moe_config, route, scale, overridden=override)


def stored_experts(speculative: Any, prefix: str) -> tuple[Stored, str]:
    """How the draft's checkpoint stores the experts of `prefix`, and what it calls their scales."""
    draft, target = speculative.draft_model_config, speculative.target_model_config
    separate = (target.model, target.revision) if draft.model != target.model else None
    try:
        found = _source((draft.model, draft.revision), separate).lookup(prefix)
    except NoHeadersError as error:
        return Stored(Format.ABSENT, note=str(error)), _SCALES[0]
    scale = next((name for name in _SCALES if name in found.roles), _SCALES[0])
    return found.stored, scale


@lru_cache(maxsize=8)
def _source(draft: tuple[str, str | None], target: tuple[str, str | None] | None) -> Source:
    """The draft's headers, read once; checkpoints are (model, revision), the target's when it is another one."""
    return source_of(read_checkpoint(*draft), read_config(*target) if target is not None else None)


def _route(stored: Stored) -> Route | None:
    if stored.format is Format.FP8_BLOCK and stored.block == (128, 128):
        return "native"
    if stored.format is Format.UNQUANTIZED and stored.dtype in ("F16", "BF16"):
        return "online"
    return None


def no_kernel(device: Any) -> str:
    """Why the operator cannot run on `device`, empty when it can; loads the CUDA kernel when it is there."""
    import torch

    from drafttools.experts import extension, op

    kind = torch.device(device).type
    if kind == "cuda" and torch.version.hip is None:
        try:
            extension.load()
        except DraftToolsError as error:
            return str(error)
    keys = {"cpu": "CPU", "cuda": "CUDA"}
    if kind in keys and torch._C._dispatch_has_kernel_for_dispatch_key(op.NAME, keys[kind]):
        return ""
    return f"{op.NAME} has no kernel for this {kind} device"
