"""The quantization methods of a draft while vLLM builds it: ask stock, look at the checkpoint, correct.

Imports vLLM inside functions only; everything here runs in construction code, outside compiled graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

from drafttools import attest, settings
from drafttools.errors import DraftToolsError
from drafttools.formats import Checkpoint, Format, HeaderError, NoHeadersError, Stored, read_checkpoint
from drafttools.routing import Action, Decision, Lookup, Source, chosen_before, decide, read_by, reads, source_of
from drafttools.scope import in_draft_model

PATCH_NAME = "draft_quantization"
DRAFT_MODEL = "draft_model."

# Where quantization configs keep the modules they leave alone (vLLM 0.26 to 0.33).
_EXCLUSIONS = ("ignored_layers", "modules_to_not_convert", "exclude_modules", "ignore", "_modelopt_ignore")
# What DeepSeek-V4's config works out on the first question and keeps (models/deepseek_v4/quant_config.py).
_MEMOISED = ("_resolved_expert_dtype", "_resolved_moe_quant_algo", "_nvfp4_config")

_routing: ContextVar[bool] = ContextVar("drafttools_routing", default=False)
_layers: ContextVar[dict[str, dict[str, Any]] | None] = ContextVar("drafttools_layers", default=None)

Method = Callable[[Any, str], Any]


@contextmanager
def session(vllm_config: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """Around the load of a draft: yields what was decided for each layer, by runtime prefix.

    The target's quantization config starts the draft without the answers it memoised for the target, and is put back
    to what it was, whatever the draft's classes did to it.
    """
    config = getattr(vllm_config, "quant_config", None)
    attributes = {} if config is None else vars(config)
    before = {name: (v, copy.deepcopy(v)) for name, v in attributes.items() if _is_state(v) or name in _MEMOISED}
    for name in before.keys() & set(_MEMOISED):
        setattr(config, name, None)
    layers: dict[str, dict[str, Any]] = {}
    token = _layers.set(layers)
    try:
        yield layers
    finally:
        _layers.reset(token)
        _restore(config, before)


def _is_state(value: Any) -> bool:
    return value is None or isinstance(value, (dict, list, set, tuple, str, int, float, bool))


def _restore(config: Any, before: dict[str, tuple[Any, Any]]) -> None:
    """Put a config's attributes back, the same containers with the same content."""
    for name in [name for name in vars(config) if name not in before] if config is not None else []:
        if _is_state(vars(config)[name]):
            delattr(config, name)
    for name, (value, content) in before.items():
        if isinstance(value, (dict, set)) and value != content:
            value.clear()
            value.update(content)
        elif isinstance(value, list) and value != content:
            value[:] = content
        setattr(config, name, value)


def get_quant_method(wrapped: Method, config: Any, layer: Any, prefix: str) -> Any:
    """`config.get_quant_method(layer, prefix)` for a draft, and stock's own answer for anything else.

    Raises DraftToolsError when no method can load what the checkpoint holds.
    """
    if not in_draft_model() or _routing.get():
        return wrapped(layer, prefix)
    token = _routing.set(True)
    try:
        return _route(wrapped, config, layer, prefix)
    finally:
        _routing.reset(token)


def is_mxfp4_quant(wrapped: Method, config: Any, layer: Any, prefix: str) -> Any:
    """`config.is_mxfp4_quant(prefix, layer)` of vLLM 0.26 and older, in step with `get_quant_method`."""
    stock = wrapped(layer, prefix)
    source = _source()
    if not in_draft_model() or _kind(layer) != "experts" or source is None:
        return stock
    known = Format.MXFP4 if stock else None
    answer = _decide(source, config, source.lookup(prefix), known, "experts").answer
    return stock if answer is None else answer is Format.MXFP4


def _route(wrapped: Method, config: Any, layer: Any, prefix: str) -> Any:
    # vLLM's draft_model method builds under "draft_model.", which the draft's own ignore lists cannot match.
    asked = prefix.removeprefix(DRAFT_MODEL)
    kind, source = _kind(layer), _source()
    if kind is None or source is None:
        return wrapped(layer, asked)
    attest.evidence(PATCH_NAME).asked += 1
    had_scheme = hasattr(layer, "scheme")
    stock, failure = None, None
    try:
        stock = wrapped(layer, asked)
        known = read_by(stock, getattr(layer, "scheme", None))
    except Exception as error:  # a method that finds no kernel here is no reason to fail, if it is the wrong one
        failure, known = error, read_by(chosen) if (chosen := chosen_before(error)) else None
    lookup = source.lookup(prefix, getattr(config, "packed_modules_mapping", None))
    decision = _decide(source, config, lookup, known, kind, stock_failed=failure is not None)
    replace = decision.action is Action.REPLACE and settings.mode() == "enforce"
    if decision.action is Action.STOP and settings.mode() == "enforce" and not settings.allow_unverified():
        raise DraftToolsError(_refusal(prefix, lookup, known, config, decision.reason)) from failure
    if not replace:
        _record(prefix, lookup, known, known, stock, decision)
        if failure is not None:
            raise failure
        return stock
    if not had_scheme and hasattr(layer, "scheme"):
        del layer.scheme
    method = _build(wrapped, config, layer, asked, decision.answer, lookup, kind)
    built = read_by(method, getattr(layer, "scheme", None))
    if built is None or not reads(built, Stored(decision.answer, block=lookup.stored.block)):  # type: ignore[arg-type]
        raise DraftToolsError(_refusal(prefix, lookup, known, config, f"the replacement reads {built}"))
    attest.evidence(PATCH_NAME).declined += 1
    _record(prefix, lookup, known, built, method, decision)
    return method


def _decide(
    source: Source, config: Any, lookup: Lookup, known: Format | None, kind: str, *, stock_failed: bool = False
) -> Decision:
    # A config that lists what its exporter left alone (DeepSeek-V4.1 from 0.32 on) needs no index rule.
    listed = bool(getattr(config, "_modelopt_ignore", ()))
    return decide(
        lookup,
        known,
        routed_experts=kind == "experts",
        trunk_nvfp4=source.trunk_nvfp4 and not listed,
        family=str(config.get_name()),
        stock_failed=stock_failed,
    )


def _record(
    prefix: str, lookup: Lookup, stock: Format | None, effective: Format | None, method: Any, decision: Decision
) -> None:
    layers = _layers.get()
    if layers is not None:
        layers[prefix] = {
            "stored": str(lookup.stored.format),
            "stock": str(stock) if stock else None,
            "effective": str(effective) if effective else None,
            "method": type(method).__name__ if method is not None else None,
            "action": str(decision.action),
            "reason": decision.reason,
        }


def _refusal(prefix: str, lookup: Lookup, stock: Format | None, config: Any, reason: str) -> str:
    import vllm

    return (
        f"draft layer {prefix}: the checkpoint holds {lookup.stored.format}, {type(config).__name__} of vLLM "
        f"{vllm.__version__} chose {f'a method for {stock}' if stock else 'no method drafttools knows'}, and none fits "
        f"({reason}). Run `drafttools audit` on the checkpoint, use one whose draft vLLM can load, or set "
        f"{settings.ALLOW_UNVERIFIED}=1 to let stock's choice stand and have it reported"
    )


def _kind(layer: Any) -> str | None:
    """`linear`, `experts`, `head` or `embedding`; None for layers without weights of their own (attention)."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    kinds = ((RoutedExperts, "experts"), (LinearBase, "linear"), (ParallelLMHead, "head"))
    return next((k for cls, k in (*kinds, (VocabParallelEmbedding, "embedding")) if isinstance(layer, cls)), None)


# --- the checkpoint of the draft that is being built ---


def _source() -> Source | None:
    from vllm import config

    current = getattr(config, "get_current_vllm_config_or_none", config.get_current_vllm_config)()
    speculative = getattr(current, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    target = getattr(speculative, "target_model_config", None)
    return None if draft is None or target is None else _open(_Key(draft, target))


class _Key:
    """Draft and target configs, hashed by where their checkpoints lie: reading happens once a draft."""

    def __init__(self, draft: Any, target: Any) -> None:
        self.draft, self.target = draft, target
        self.where = (_place(draft), _place(target))

    def __hash__(self) -> int:
        return hash(self.where)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.where == other.where


def _place(model_config: Any) -> tuple[str, str | None]:
    model = str(model_config.model)
    return (str(Path(model).resolve()) if Path(model).is_dir() else model), getattr(model_config, "revision", None)


@lru_cache(maxsize=8)
def _open(key: _Key) -> Source:
    """Read the draft's headers. Without any, or with headers that contradict themselves, layers are unverified."""
    (draft, revision), (target, _) = key.where
    embedded = draft == target
    target_config = None if embedded else _as_dict(key.target.hf_config)
    try:
        return source_of(read_checkpoint(draft, revision), target_config)
    except (NoHeadersError, HeaderError) as error:
        attest.note(f"draft quantization is unverified: {error}")
        # vLLM rewrites a draft's config for its MTP classes; the target's is as the checkpoint has it.
        own = _as_dict((key.target if embedded else key.draft).hf_config)
        return source_of(Checkpoint(draft, own, {}), target_config, note=str(error))


def _as_dict(hf_config: Any) -> dict[str, Any]:
    """A transformers config as its config.json; `to_dict` takes `model_type` from the class, which may be generic."""
    values: dict[str, Any] = hf_config.to_dict()
    values["model_type"] = getattr(hf_config, "model_type", "")
    nested = getattr(hf_config, "text_config", None)
    return values | ({"text_config": _as_dict(nested)} if hasattr(nested, "to_dict") else {})


# --- building methods, as the installed vLLM builds them ---


def _build(
    wrapped: Method, config: Any, layer: Any, prefix: str, answer: Format | None, lookup: Lookup, kind: str
) -> Any:
    if answer is Format.UNQUANTIZED:
        return _unquantized(layer, kind)
    return _asking_config(config, answer, lookup).get_quant_method(layer, prefix)


def _unquantized(layer: Any, kind: str) -> Any:
    if kind == "experts":
        from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

        return UnquantizedFusedMoEMethod(layer.moe_config)
    if kind == "linear":
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        return UnquantizedLinearMethod()
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    return UnquantizedEmbeddingMethod()


def _asking_config(config: Any, answer: Format | None, lookup: Lookup) -> Any:
    """A quantization config whose stock answer for the layer is the right one."""
    if type(config).__name__ == "DeepseekV4FP8Config" and (twin := _deepseek_twin(config, answer)) is not None:
        return twin
    from drafttools.routing import FAMILIES

    if answer in FAMILIES.get(str(config.get_name()), ()):
        return _without_exclusions(config)
    fresh = _fresh_config(answer, lookup)
    fresh.packed_modules_mapping = config.packed_modules_mapping
    return fresh


def _without_exclusions(config: Any) -> Any:
    twin = copy.copy(config)
    for name in _EXCLUSIONS:
        value = getattr(twin, name, None)
        if value:
            setattr(twin, name, type(value)())
    return twin


def _deepseek_twin(config: Any, answer: Format | None) -> Any:
    """DeepSeek-V4's own config, told what the experts are: it adds what its release needs, like `activation_key`."""
    told = {Format.MXFP4: ("fp4", ""), Format.NVFP4: ("fp4", "NVFP4"), Format.FP8_BLOCK: ("fp8", "")}
    if answer not in told:
        return None
    twin = _without_exclusions(config)
    twin._resolved_expert_dtype, twin._resolved_moe_quant_algo = told[answer]
    return twin


def _fresh_config(answer: Format | None, lookup: Lookup) -> Any:
    from vllm.model_executor.layers.quantization import fp8, modelopt, mxfp4

    roles, scale = lookup.roles, lookup.roles.get("weight_scale")
    if answer is Format.MXFP4:
        return mxfp4.Mxfp4Config()
    if answer is Format.NVFP4:
        return modelopt.ModelOptNvFp4Config(
            is_checkpoint_nvfp4_serialized=True, kv_cache_quant_algo=None, exclude_modules=[], group_size=16
        )
    if answer is Format.MXFP8:
        return modelopt.ModelOptMxFp8Config(
            is_checkpoint_mxfp8_serialized=True, kv_cache_quant_algo=None, exclude_modules=[]
        )
    if answer is Format.FP8_BLOCK and scale is not None and len(scale.shape) == 4:
        return modelopt.ModelOptFp8Config(
            quant_method="FP8_PB_WO",
            is_checkpoint_fp8_serialized=True,
            kv_cache_quant_method=None,
            exclude_modules=[],
        )
    block = list(lookup.stored.block or ()) if answer is Format.FP8_BLOCK else None
    static = answer is Format.FP8_TENSOR and "input_scale" in roles
    fresh = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="static" if static else "dynamic",
        weight_block_size=block,
    )
    scales = roles.get("weight_scale_inv") or roles.get("scale")
    if scales is not None and scales.dtype == "F8_E8M0":
        fresh.is_scale_e8m0 = True  # as DeepSeek-V4's config says it; Fp8LinearMethod looks for the attribute
    return fresh
