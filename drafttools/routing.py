"""Which quantization method a draft layer has to load with: pure decisions, no torch and no vLLM.

The checkpoint's own tensors decide. Where they cannot be read, stock's answer stands and one index rule applies:
NVFP4 conversions of DeepSeek-V4 leave the draft's routed experts in the native MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drafttools.formats import (
    Checkpoint,
    Format,
    Stored,
    classify,
    combine,
)
from drafttools.names import Layout, Place, Resolver, layout_of, text_config


class Action(StrEnum):
    """What becomes of stock's method for one layer."""

    KEEP = "keep"  # the checkpoint agrees with it
    REPLACE = "replace"  # the checkpoint contradicts it
    STOP = "stop"  # no method can load what the checkpoint holds
    UNVERIFIED = "unverified"  # the checkpoint does not tell; stock's method stands


@dataclass(frozen=True)
class Decision:
    """What to do about one draft layer, the format to load it with (None: unknown), and why."""

    action: Action
    answer: Format | None
    reason: str = ""


@dataclass(frozen=True)
class Lookup:
    """What the checkpoint holds for a runtime prefix."""

    place: Place
    stored: Stored
    modules: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    roles: Mapping[str, Any] = field(default_factory=dict)  # of the first module: role -> Tensor


@dataclass(frozen=True)
class Source:
    """A draft's checkpoint and how its runtime prefixes are found in it; `note` says why there are no headers."""

    resolver: Resolver
    trunk_nvfp4: bool
    note: str = ""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint; without tensors where no header could be read."""
        return self.resolver.checkpoint

    @property
    def layout(self) -> Layout:
        """Where the draft layers lie."""
        return self.resolver.layout

    def lookup(self, prefix: str, fused: Mapping[str, Iterable[str]] | None = None) -> Lookup:
        """Find what a runtime prefix is stored as; `fused` is the config's packed_modules_mapping."""
        found = self.resolver.find(prefix, fused)
        modules = self.checkpoint.modules
        stored = combine(classify(modules[name]) for name in found.modules)
        if stored.format is Format.ABSENT:
            stored = Stored(Format.ABSENT, note=self.note or found.place.problem or "the checkpoint has no such module")
        roles = modules[found.modules[0]] if found.modules else {}
        return Lookup(found.place, stored, found.modules, found.missing, roles)


def source_of(checkpoint: Checkpoint, target_config: Mapping[str, Any] | None = None, note: str = "") -> Source:
    """Make a Source of a checkpoint that was read; `target_config` is given when the draft is separate."""
    resolver = Resolver(checkpoint, layout_of(checkpoint, target_config))
    config = target_config if target_config is not None else checkpoint.config
    return Source(resolver, is_nvfp4_deepseek_v4(config), note)


def is_nvfp4_deepseek_v4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DeepSeek-V4 or V4.1 checkpoint whose routed experts were made NVFP4."""
    quantization = config.get("quantization_config") or {}
    model_type = str(text_config(config).get("model_type", config.get("model_type", "")))
    algorithm = str(quantization.get("moe_quant_algo") or "").upper()
    return model_type.startswith("deepseek_v4") and algorithm == "NVFP4"


# What a quantization config can build by itself, by vLLM's and by the checkpoints' name for it.
FAMILIES: dict[str, frozenset[Format]] = {
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), frozenset({Format.INT4_AWQ})),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), frozenset({Format.INT4_GPTQ})),
    "moe_wna16": frozenset({Format.INT4_AWQ, Format.INT4_GPTQ}),
    "compressed-tensors": frozenset(
        {Format.INT4_CT, Format.NVFP4, Format.MXFP4, Format.MXFP8, Format.INT8_CHANNEL}
        | {Format.FP8_TENSOR, Format.FP8_CHANNEL, Format.FP8_BLOCK}
    ),
}


def buildable(lookup: Lookup, *, routed_experts: bool, family: str) -> bool:
    """Whether a vLLM method can be built that fills its parameters from the tensors as they are named.

    `family` is the name of the quantization config that was asked. A format stored under names that none of the
    methods has parameters for does not count.
    """
    stored, roles = lookup.stored, lookup.roles.keys()
    if stored.format is Format.UNQUANTIZED or stored.format in FAMILIES.get(family, ()):
        return True
    if "weight" not in roles:
        return False
    scale = lookup.roles.get("weight_scale")
    if stored.format is Format.FP8_BLOCK:
        modelopt = scale is not None and len(scale.shape) == 4 and not routed_experts
        return bool(roles & {"weight_scale_inv", "scale"}) or modelopt
    if stored.format is Format.MXFP4:
        return routed_experts and bool(roles & {"weight_scale", "scale"})
    if stored.format is Format.NVFP4:
        return {"weight_scale", "weight_scale_2"} <= roles
    return stored.format in (Format.FP8_TENSOR, Format.MXFP8) and scale is not None


def decide(
    lookup: Lookup,
    stock: Format | None,
    *,
    routed_experts: bool,
    trunk_nvfp4: bool,
    family: str,
    stock_failed: bool = False,
) -> Decision:
    """Decide for one layer of a draft.

    `stock` is the format that stock's method reads (None: a method we do not know, or none at all when
    `stock_failed`), `family` the name of the quantization config that was asked. The headers win over the index rule,
    which needs none of them.
    """
    stored = lookup.stored
    if stored.format is Format.MIXED:
        return Decision(Action.STOP, None, f"one runtime module, several stored formats: {stored.note}")
    if not stored.format.loadable:
        return _without_headers(lookup, stock, routed_experts and trunk_nvfp4)
    if stock is None and not stock_failed:
        return Decision(Action.UNVERIFIED, stored.format, "stock's method is not one drafttools knows")
    if stock is not None and reads(stock, stored):
        return Decision(Action.KEEP, stored.format)
    answer = f"reads {stock}" if stock is not None else "has no method"
    contradiction = f"stock {answer}, the checkpoint holds {stored.format}"
    if buildable(lookup, routed_experts=routed_experts, family=family):
        return Decision(Action.REPLACE, stored.format, contradiction)
    return Decision(Action.STOP, None, contradiction)


def _without_headers(lookup: Lookup, stock: Format | None, nvfp4_experts: bool) -> Decision:
    """The index rule, for draft layers whose tensors could not be read."""
    in_draft_layer = lookup.place.draft and lookup.place.index is not None
    if nvfp4_experts and in_draft_layer and lookup.stored.format is Format.ABSENT:
        action = Action.KEEP if stock is Format.MXFP4 else Action.REPLACE
        return Decision(action, Format.MXFP4, "draft experts of an NVFP4 DeepSeek-V4 stay MXFP4")
    return Decision(Action.UNVERIFIED, stock, lookup.stored.note or "the checkpoint does not tell")


def reads(stock: Format, stored: Stored) -> bool:
    """Whether a method for `stock` decodes what is stored.

    vLLM's MXFP8 linear also takes DeepSeek-V4.1's 32x32 scale blocks (models/deepseek_v41/quant_config.py, 0.33.0).
    """
    return stock is stored.format or (stock is Format.MXFP8 and stored.block == (32, 32))


# --- what a vLLM quantization method reads ---

# Class name (any class of the method's MRO, or of a linear's scheme) -> format. vLLM 0.29 to 0.33.
_READS: dict[str, Format] = {
    "UnquantizedLinearMethod": Format.UNQUANTIZED,
    "UnquantizedEmbeddingMethod": Format.UNQUANTIZED,
    "UnquantizedFusedMoEMethod": Format.UNQUANTIZED,
    # Online methods load floats and quantize them afterwards.
    "OnlineLinearBase": Format.UNQUANTIZED,
    "OnlineMoEMethodBase": Format.UNQUANTIZED,
    "ExpertsInt8MoEMethod": Format.UNQUANTIZED,
    "FBGEMMFp8LinearMethod": Format.FP8_CHANNEL,
    "Mxfp4MoEMethod": Format.MXFP4,
    "GptOssMxfp4MoEMethod": Format.MXFP4,
    "CompressedTensorsW4A4Mxfp4MoEMethod": Format.MXFP4,
    "INCMxfp4MoEMethod": Format.MXFP4,
    "ModelOptFp8LinearMethod": Format.FP8_TENSOR,
    "ModelOptFp8MoEMethod": Format.FP8_TENSOR,
    "ModelOptFp8PcPtLinearMethod": Format.FP8_CHANNEL,
    "ModelOptFp8PbWoLinearMethod": Format.FP8_BLOCK,
    "ModelOptNvFp4LinearMethod": Format.NVFP4,
    "ModelOptNvFp4W4A16LinearMethod": Format.NVFP4,
    "ModelOptNvFp4FusedMoE": Format.NVFP4,
    "ModelOptMxFp8LinearMethod": Format.MXFP8,
    "ModelOptMxFp8FusedMoE": Format.MXFP8,
    "AutoAWQLinearMethod": Format.INT4_AWQ,
    "AutoAWQMarlinLinearMethod": Format.INT4_AWQ,
    "AutoAWQMoEMethod": Format.INT4_AWQ,
    "BaseAWQLinearMethod": Format.INT4_AWQ,
    "AWQLinearMethod": Format.INT4_AWQ,
    "AWQMarlinLinearMethod": Format.INT4_AWQ,
    "AWQMarlinMoEMethod": Format.INT4_AWQ,
    "AutoGPTQLinearMethod": Format.INT4_GPTQ,
    "AutoGPTQMoEMethod": Format.INT4_GPTQ,
    "GPTQLinearMethod": Format.INT4_GPTQ,
    "GPTQMarlinLinearMethod": Format.INT4_GPTQ,
    "GPTQMarlinMoEMethod": Format.INT4_GPTQ,
    "CompressedTensorsWNA16": Format.INT4_CT,
    "CompressedTensorsWNA16MoEMethod": Format.INT4_CT,
    "CompressedTensorsWNA16MarlinMoEMethod": Format.INT4_CT,
    "CompressedTensorsW4A16FlydslMoEMethod": Format.INT4_CT,
    "CompressedTensorsEmbeddingWNA16Int": Format.INT4_CT,
    "CompressedTensorsW4A4Fp4": Format.NVFP4,
    "CompressedTensorsW4A16Fp4": Format.NVFP4,
    "CompressedTensorsW4A4Nvfp4MoEMethod": Format.NVFP4,
    "CompressedTensorsW8A8Int8": Format.INT8_CHANNEL,
    "CompressedTensorsW8A8Int8MoEMethod": Format.INT8_CHANNEL,
    "CompressedTensorsW8A8Mxfp8": Format.MXFP8,
    "CompressedTensorsW8A8Mxfp8MoEMethod": Format.MXFP8,
    "QuarkW8A8Int8": Format.INT8_CHANNEL,
    "QuarkW8A8Int8MoEMethod": Format.INT8_CHANNEL,
    "QuarkW8A8Fp8PerBlock": Format.FP8_BLOCK,
    "QuarkNVFP4": Format.NVFP4,
    "QuarkNvfp4MoEMethod": Format.NVFP4,
    "QuarkW8A8Mxfp8MoEMethod": Format.MXFP8,
}
_SCALED_FP8 = frozenset(
    {
        "CompressedTensorsW8A8Fp8",
        "CompressedTensorsW8A16Fp8",
        "CompressedTensorsW8A8Fp8MoEMethod",
        "QuarkW8A8Fp8",
    }
    | {"QuarkW8A8Fp8MoEMethod"}
)
_STRATEGIES = {
    "tensor": Format.FP8_TENSOR,
    "per_tensor": Format.FP8_TENSOR,
    "channel": Format.FP8_CHANNEL,
    "per_channel": Format.FP8_CHANNEL,
    "block": Format.FP8_BLOCK,
    "per_block": Format.FP8_BLOCK,
}


def read_by(method: Any, scheme: Any = None) -> Format | None:
    """The format that a quantization method reads from a checkpoint; None for one we do not know.

    `scheme` is `layer.scheme`, where compressed-tensors and Quark linears keep what they do. No method at all means
    vLLM's unquantized default.
    """
    if method is None:
        return Format.UNQUANTIZED
    names = {cls.__name__ for cls in type(method).__mro__}
    if names & {"CompressedTensorsLinearMethod", "QuarkLinearMethod"}:
        return None if scheme is None else read_by(scheme)
    if names & {"Fp8LinearMethod", "Fp8MoEMethod"}:
        return _read_by_fp8(method)
    if "ModelOptLinearMethod" in names:
        return _read_by_key(method.spec.weight)
    if "MoeWNA16Method" in names:
        packed = {"awq": Format.INT4_AWQ, "gptq": Format.INT4_GPTQ}
        return packed.get(getattr(method.quant_config, "linear_quant_method", ""))
    if names & {"QuarkOCP_MX", "QuarkOCP_MX_MoEMethod"}:
        return Format.MXFP4 if getattr(method, "weight_dtype", None) in ("mxfp4", "fp4") else None
    if names & _SCALED_FP8:
        return _read_by_strategy(method)
    return next((_READS[name] for name in names if name in _READS), None)


def chosen_before(raised: BaseException) -> Any:
    """The quantization method or scheme whose `__init__` raised, from the traceback; None when it was none.

    A method that was chosen and finds no kernel on this machine still tells what was chosen.
    """
    trace = raised.__traceback__
    while trace is not None:
        subject = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "__init__" and subject is not None and read_by(subject) is not None:
            return subject
        trace = trace.tb_next
    return None


def read_class(name: str) -> Format | None:
    """The format that methods of a class read, where the class alone tells it."""
    return _READS.get(name)


def _read_by_fp8(method: Any) -> Format:
    config = method.quant_config
    if not getattr(config, "is_checkpoint_fp8_serialized", True):
        return Format.UNQUANTIZED  # releases whose Fp8 methods also quantize online
    return Format.FP8_BLOCK if getattr(config, "weight_block_size", None) else Format.FP8_TENSOR


def _read_by_strategy(method: Any) -> Format | None:
    quantization = getattr(method, "weight_quant", None)
    strategy = getattr(quantization, "strategy", None) or getattr(method, "strategy", None)
    if strategy is None:
        strategy = getattr(method, "weight_qscheme", None)
    return _STRATEGIES.get(str(getattr(strategy, "value", strategy)))


def _read_by_key(key: Any) -> Format | None:
    """From a vLLM QuantKey (quantization/utils/quant_utils.py, 0.32): weight dtype, scale dtype, scale group."""
    scale = getattr(key, "scale", None)
    group = getattr(scale, "group_shape", None)
    rows, columns = (getattr(group, "row", None), getattr(group, "col", None))
    dtype = str(getattr(key, "dtype", ""))
    exponent = "e8m0" in str(getattr(scale, "dtype", "")) or str(getattr(scale, "dtype", "")) == "torch.uint8"
    if "float8" in dtype:
        if columns == 32 and exponent:
            return Format.MXFP8
        if (rows, columns) == (-1, -1):
            return Format.FP8_TENSOR
        return Format.FP8_CHANNEL if -1 in (rows, columns) else Format.FP8_BLOCK
    if "4" in dtype or dtype == "torch.uint8":
        return Format.MXFP4 if exponent else Format.NVFP4
    return None
