"""vLLM's real RoutedExperts on the CPU, at any tensor-parallel rank, for drafts with a small checkpoint directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from drafttools.experts.layout import BLOCK
from drafttools.scope import draft_model_scope

EXPERTS, HIDDEN, WIDTH = 2, 256, 640
PREFIX = "mtp.layers.2.mlp.experts"  # vLLM's name: the draft's layers count on from the target's
STORED = "mtp.layers.0.mlp.experts"


def quantization_config(target: str, fp8: bool) -> dict[str, Any]:
    """A target's quantization_config; with `fp8` it declares the draft's experts as block FP8 where it can."""
    modelopt = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    nvfp4 = {"model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    return {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["mtp*"]},
        "mixed": {**modelopt, "quantized_layers": nvfp4 | ({STORED: {"quant_algo": "FP8_PB_WO"}} if fp8 else {})},
        "block_scales": {
            **modelopt,
            "quantized_layers": nvfp4 | {STORED: {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}},
        },
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    }[target]


def config_json(quantization: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "qwen4_exp",
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen4_exp_text",
            "num_hidden_layers": 2,
            "mtp_num_hidden_layers": 1,
            "num_experts": EXPERTS,
        },
    }
    return config | ({"quantization_config": quantization} if quantization else {})


def projections(hidden: int = HIDDEN, width: int = WIDTH) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}


def fp16_stream(seed: int = 0, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of unquantized experts, by name below the layer."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{expert}.{name}.weight": (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for expert in range(EXPERTS)
        for name, shape in projections().items()
    }


def fp8_stream(
    seed: int = 0, suffix: str = "weight_scale_inv", dtype: torch.dtype = torch.float32, four_d: bool = False
):
    """Checkpoint tensors of block-FP8 experts: random finite bytes and scales."""
    generator = torch.Generator().manual_seed(seed)
    stream = {}
    for expert in range(EXPERTS):
        for name, shape in projections().items():
            raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            raw[(raw & 0x7F) == 0x7F] = 0
            scale = torch.rand([-(-size // BLOCK) for size in shape], generator=generator) * 1e-3
            scale = scale[:, None, :, None] if four_d else scale
            stream[f"{expert}.{name}.weight"] = raw.view(torch.float8_e4m3fn)
            stream[f"{expert}.{name}.{suffix}"] = scale.to(dtype).contiguous()
    return stream


def write_checkpoint(path: Path, stream: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_json(quantization)))
    save_file({f"{STORED}.{name}": tensor for name, tensor in stream.items()}, path / "model.safetensors")
    return path


def speculative_config(draft: Path, target: Path | None = None, option: str | None = "fp8", **changes: Any) -> Any:
    """What the selection reads of vLLM's SpeculativeConfig."""

    def model(path: Path, architecture: str) -> Any:
        return SimpleNamespace(model=str(path), revision=None, hf_config=SimpleNamespace(architectures=[architecture]))

    fields = {
        "method": "mtp",
        "mtp_expert_quantization": option,
        "rejection_sample_method": "standard",
        "draft_model_config": model(draft, "Qwen4ExpMTP"),
        "target_model_config": model(target or draft, "Qwen4ExpForConditionalGeneration"),
    }
    return SimpleNamespace(**fields | changes)


@contextlib.contextmanager
def draft_load(speculative: Any) -> Iterator[VllmConfig]:
    """The draft scope and a current VllmConfig with this speculative config, as while vLLM builds a draft."""
    config = VllmConfig()
    config.speculative_config = speculative
    with set_current_vllm_config(config), draft_model_scope():
        yield config


def build(
    quant_config: Any = None,
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    width: int = WIDTH,
    dtype=torch.float16,
    **changes: Any,
) -> RoutedExperts:
    """A real RoutedExperts as one rank of a tensor-parallel group would build it."""
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.tp_size, parallel.tp_rank = tp_size, tp_rank
    moe = FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size=width,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=dtype,
    )
    experts = ExpertMapManager(
        max_num_batched_tokens=16,
        top_k=2,
        global_num_experts=EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    return RoutedExperts(PREFIX, dtype, moe, quant_config, expert_map_manager=experts, **changes)


def volta(**changes: Any) -> Any:
    """Simulate the platform the kernel is for; the CPU operator stands in for the device's."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    cls = type(current_platform)
    facts = {
        "is_cuda": mock.Mock(return_value=True),
        "is_cpu": mock.Mock(return_value=False),
        "is_rocm": mock.Mock(return_value=False),
        "get_device_capability": mock.Mock(return_value=DeviceCapability(7, 0)),
    }
    return mock.patch.multiple(cls, **facts | changes)
