"""Process-wide precision switches that reach a draft model, gated or not.

Each is read from the live configuration when a draft loads. Gated ones belong to a patch; the rest are named in the
report as reaching the draft ungated. Readers are given the draft's VllmConfig and the `vllm.envs` module, and return
one phrase, or None when the switch is off. Source of the list: vLLM 0.33.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reader = Callable[[Any, Any], str | None]


@dataclass(frozen=True)
class Ungated:
    """A switch that lowers draft precision and that drafttools only reports."""

    name: str
    reads: str  # where vLLM 0.33.0 reads it
    why_not: str
    native: str  # vLLM's own per-draft override, if any
    on: Reader


def env_flag(name: str) -> Reader:
    """A reader for an environment switch that is on when true."""

    def read(_: Any, envs: Any) -> str | None:
        value = getattr(envs, name, None)
        return f"{name}={value}" if value else None

    return read


def env_set(name: str) -> Reader:
    """A reader for an environment switch that the user must have set: its default already counts as off."""

    def read(_: Any, envs: Any) -> str | None:
        is_set = getattr(envs, "is_set", lambda _: False)
        try:
            return f"{name}={getattr(envs, name)}" if is_set(name) and getattr(envs, name) else None
        except AttributeError:
            return None

    return read


def activation_override(kind: str) -> Reader:
    """A reader for `quantization_config.<kind>.activation`, `kind` being `moe` or `linear`."""

    def read(vllm_config: Any, _: Any) -> str | None:
        args = getattr(getattr(vllm_config, "model_config", None), "quantization_config", None)
        activation = getattr(getattr(args, kind, None), "activation", None)
        return f"quantization_config.{kind}.activation={activation}" if activation is not None else None

    return read


def _kv_cache_dtype(vllm_config: Any, _: Any) -> str | None:
    dtype = str(getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", "auto"))
    override = getattr(vllm_config.speculative_config, "kv_cache_dtype", None)
    if dtype in ("auto", "bfloat16", "float16") or override is not None:
        return None
    return f"--kv-cache-dtype {dtype}"


def _config_flag(section: str, name: str) -> Reader:
    def read(vllm_config: Any, _: Any) -> str | None:
        value = getattr(getattr(vllm_config, section, None), name, None)
        return f"{section}.{name}={value}" if value else None

    return read


def _fusion_passes(vllm_config: Any, _: Any) -> str | None:
    passes = getattr(getattr(vllm_config, "compilation_config", None), "pass_config", None)
    names = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant")
    on = [name for name in names if getattr(passes, name, None)]
    return ", ".join(f"pass_config.{name}" for name in on) or None


def _moe_backend(vllm_config: Any, _: Any) -> str | None:
    backend = getattr(getattr(vllm_config, "kernel_config", None), "moe_backend", None)
    override = getattr(vllm_config.speculative_config, "moe_backend", None)
    if backend in (None, "auto") or override is not None:
        return None
    return f"kernel_config.moe_backend={backend}"


def _fp8_while_loading(vllm_config: Any, _: Any) -> str | None:
    quant_config = getattr(vllm_config, "quant_config", None)
    online = type(quant_config).__name__ == "Fp8Config" and not getattr(
        quant_config, "is_checkpoint_fp8_serialized", True
    )
    return "--quantization fp8" if online else None


def _modelopt_moe_activation(vllm_config: Any, _: Any) -> str | None:
    activation = getattr(getattr(vllm_config, "quant_config", None), "moe_activation_override", None)
    return f"quantization_config.moe.activation={activation}" if activation is not None else None


def _deepseek_v4_wo_a(vllm_config: Any, envs: Any) -> str | None:
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    model_type = str(getattr(getattr(draft, "hf_config", None), "model_type", ""))
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    if not model_type.startswith("deepseek_v4") or platform is None or not platform.is_rocm():
        return None
    return env_flag("VLLM_ROCM_USE_AITER_FP8BMM")(vllm_config, envs)


UNGATED: tuple[Ungated, ...] = (
    Ungated(
        "kv_cache_dtype",
        "attention.py and mla_attention.py constructors",
        "the draft often shares KV-cache groups and layout with the target",
        'speculative_config "kv_cache_dtype"',
        _kv_cache_dtype,
    ),
    Ungated(
        "moe_backend",
        "fused_moe/oracle/mxfp4.py",
        "which kernel family runs is a deployment choice; some quantize activations",
        'speculative_config "moe_backend"',
        _moe_backend,
    ),
    Ungated(
        "fp8_while_loading",
        "quantization/fp8.py of vLLM 0.30 and older",
        "there Fp8Config itself quantizes an unquantized checkpoint, past the online configuration",
        "",
        _fp8_while_loading,
    ),
    Ungated(
        "modelopt_moe_activation",
        "quantization/modelopt.py, from 0.32 on",
        "kept in the quantization config object, which an MTP draft shares with the target",
        "",
        _modelopt_moe_activation,
    ),
    Ungated(
        "deepseek_v4_wo_a",
        "models/deepseek_v4/amd/rocm.py, from 0.31 on",
        "read from the environment, past the AITER methods that aiter_bmm gates",
        "",
        _deepseek_v4_wo_a,
    ),
    Ungated(
        "aiter_moe_situv2",
        "_aiter_ops.py at import, and AITER's own process environment",
        "AITER reads it process-wide",
        "",
        env_set("VLLM_ROCM_USE_AITER_MOE_SITUV2"),
    ),
    Ungated(
        "deep_gemm_e8m0",
        "utils/deep_gemm.py (cached), fp8_utils.py",
        "weights and activations must agree, and the decision is cached for the process; FP8-block drafts only",
        "",
        env_set("VLLM_USE_DEEP_GEMM_E8M0"),
    ),
    Ungated(
        "humming",
        "quantization/humming.py, fused_humming_moe.py",
        "read in many places, at construction and in forward",
        "",
        lambda c, e: (
            env_set("VLLM_HUMMING_ONLINE_QUANT_CONFIG")(c, e) or env_set("VLLM_HUMMING_INPUT_QUANT_CONFIG")(c, e)
        ),
    ),
    Ungated(
        "expert_all2all",
        "all2all.py, deepep_ll.py",
        "the dispatch and combine buffers are shared between target and draft",
        "",
        lambda c, e: (
            env_set("VLLM_DEEPEPLL_NVFP4_DISPATCH")(c, e)
            or env_set("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE")(c, e)
        ),
    ),
    Ungated(
        "query_quantization",
        "config/attention.py",
        "the attention configuration is shared",
        'speculative_config "attention_backend"',
        _config_flag("attention_config", "use_prefill_query_quantization"),
    ),
    Ungated(
        "rocm_fp8_page_attention",
        "_custom_ops.py, a default argument bound at import",
        "bound at import",
        "",
        env_set("VLLM_ROCM_FP8_MFMA_PAGE_ATTN"),
    ),
    Ungated(
        "muse_moe_online_quant",
        "muse_moe_runner.py",
        "one model family reads it, in forward",
        "",
        env_set("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT"),
    ),
    Ungated(
        "float32_matmul_precision",
        "gpu_worker.py",
        "a process-global torch setting",
        "",
        env_set("VLLM_FLOAT32_MATMUL_PRECISION"),
    ),
    Ungated(
        "fusion_passes",
        "config/compilation.py, PassConfig",
        "target and draft share the compilation configuration; numerics change only at quantized ops",
        "",
        _fusion_passes,
    ),
    Ungated(
        "cpu_int4_w4a8",
        "mixed_precision/cpu.py",
        "one CPU kernel reads it; affects int4 drafts only",
        "",
        env_set("VLLM_CPU_INT4_W4A8"),
    ),
)


def ungated(vllm_config: Any, envs: Any) -> list[str]:
    """Switches that are on and that nothing here gates, one sentence each."""
    found = []
    for hazard in UNGATED:
        phrase = hazard.on(vllm_config, envs)
        if phrase:
            found.append(f"{hazard.name}: {phrase} reaches the draft ({hazard.why_not})")
    return found
