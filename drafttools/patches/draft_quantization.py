"""Give every draft layer the quantization method that its tensors in the checkpoint need."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from drafttools import quantization
from drafttools.patching import Patch, Seam, Transaction


def _wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if wrapped.__name__ == "is_mxfp4_quant":
        prefix, layer = _prefix_and_layer(*args, **kwargs)
        return quantization.is_mxfp4_quant(lambda layer, prefix: wrapped(prefix, layer), instance, layer, prefix)
    layer, prefix = _layer_and_prefix(*args, **kwargs)
    return quantization.get_quant_method(wrapped, instance, layer, prefix)


def _layer_and_prefix(layer: Any, prefix: str) -> tuple[Any, str]:
    return layer, prefix


def _prefix_and_layer(prefix: str, layer: Any) -> tuple[str, Any]:
    return prefix, layer


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_family(module.QuantizationConfig, ("get_quant_method", "is_mxfp4_quant"), _wrapper)


PATCH = Patch(
    name=quantization.PATCH_NAME,
    module="vllm.model_executor.layers.quantization.base_config",
    seams=(
        Seam("QuantizationConfig.get_quant_method", parameters=("self", "layer", "prefix")),
        Seam("QuantizationConfig.is_mxfp4_quant", parameters=("self", "prefix", "layer"), optional=True),
    ),
    what="Inside the draft scope, looks up what the checkpoint holds for a layer and replaces a quantization method "
    "that would read it as something else; stops the load when there is no right method. Also matches the draft_model "
    "method's layers under the names that the draft's own ignore lists use.",
    why="Embedded drafts are built with the target's quantization config, most of which never look at the layer's "
    "name, or match it against lists written for other names. MXFP4 experts read as NVFP4 load without an error and "
    "are never accepted.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/quantization/base_config.py",
    retire="When vLLM takes a layer's quantization from the checkpoint's tensors.",
    apply=_apply,
)
