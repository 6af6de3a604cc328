"""The vLLM fused-MoE method whose experts stay in FP8 and run `drafttools::fp8_experts`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from drafttools import attest
from drafttools.errors import DraftToolsError
from drafttools.experts import op
from drafttools.experts.admission import Route
from drafttools.experts.layout import Layout
from drafttools.experts.loading import ExpertLoader

PATCH = "fp8_experts"


class Fp8ExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """FP8 experts of one draft layer, written for vLLM 0.32 and 0.33's FusedMoEMethodBase.

    Args:
        moe: the layer's FusedMoEConfig.
        route: "online" quantizes FP16/BF16 checkpoint tensors while they load; "native" takes E4M3 and 128x128 scales.
        scale_suffix: what the checkpoint calls a scale, on the native route.
        overridden: the developer override let this layer in; reported.
    """

    def __init__(
        self, moe: Any, route: Route, scale_suffix: str = "weight_scale_inv", overridden: bool = False
    ) -> None:
        super().__init__(moe)
        self.route, self.scale_suffix, self.overridden = route, scale_suffix, overridden
        self.layout = Layout(
            experts=moe.num_experts,
            hidden=moe.hidden_dim,
            intermediate=moe.intermediate_size,
            tp_size=moe.tp_size,
            tp_rank=moe.tp_rank,
            blocks=route == "native",
        )
        self.loader: ExpertLoader | None = None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Sizes as they are: nothing is padded."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Register w13_weight, w2_weight and their scales on `layer`, and take over its loading.

        Online scales are buffers: they are no checkpoint tensors, and vLLM's check that every parameter was loaded
        must not look for them.
        """
        _refuse_unknown_computation(layer)
        tensors = self.layout.allocate()
        projections = {
            "w1": layer.ckpt_gate_proj_name, "w2": layer.ckpt_down_proj_name, "w3": layer.ckpt_up_proj_name
        }  # fmt: skip
        self.loader = ExpertLoader(
            layer.layer_name, self.layout, lambda name: self._held(layer, name), projections, self.scale_suffix
        )
        for name in ("w13", "w2"):
            self._register(layer, f"{name}_weight", tensors[name], "weight")
            scale = tensors[f"{name}_scale"]
            if self.layout.blocks:
                self._register(layer, f"{name}_{self.scale_suffix}", scale, self.scale_suffix)
            else:
                layer.register_buffer(f"{name}_weight_scale", scale, persistent=False)
        load_weights = layer.load_weights
        layer.load_weights = lambda weights: load_weights(self._loader().watch(weights))

    def _register(self, layer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)

        def weight_loader(
            param: Any,
            loaded_weight: Any,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            self._loader().load(kind, loaded_weight, shard_id, expert_id)
            return True if return_success else None

        parameter.weight_loader = weight_loader

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that the layer is whole and report it; the weights already are in the operator's layout."""
        self._loader().finish()
        held = {name: self._held(layer, name) for name in self.layout.shapes()}
        resident = sum(tensor.nbytes for tensor in held.values())
        attest.evidence(PATCH).asked += 1
        attest.evidence(PATCH).declined += 1
        layer.drafttools_fp8_experts = {
            "route": self.route,
            "experts": self.layout.experts,
            "bytes_fp16": self.layout.fp16_bytes(),
            "bytes_fp8": resident,
            "unsupported_override": self.overridden,
        }
        attest.note(
            f"{layer.layer_name}: experts are FP8 ({self.route}), {self.layout.fp16_bytes()} bytes as FP16, "
            f"{resident} resident" + ("; admitted by the developer override" if self.overridden else "")
        )

    def _held(self, layer: Any, name: str) -> torch.Tensor:
        """The layer's tensor for one of the operator's arguments; moved or offloaded ones included."""
        stem, _, scale = name.partition("_")
        suffix = (self.scale_suffix if self.layout.blocks else "weight_scale") if scale else "weight"
        tensor: torch.Tensor = getattr(layer, f"{stem}_{suffix}")
        return tensor

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no modular kernel runs these experts."""
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, H] through the experts; vLLM's runner does the shared experts and the all-reduce."""
        layout = self.layout
        return op.fp8_experts(
            x,
            self._held(layer, "w13"),
            self._held(layer, "w13_scale"),
            self._held(layer, "w2"),
            self._held(layer, "w2_scale"),
            topk_weights,
            topk_ids,
            layout.block,
            layout.block,
            layout.offset,
            layout.offset,
        )

    def _loader(self) -> ExpertLoader:
        assert self.loader is not None, "create_weights has not run"
        return self.loader


def _refuse_unknown_computation(layer: Any) -> None:
    """DraftToolsError for an expert computation that the operator does not do."""
    moe = layer.moe_config
    differences = {
        f"activation {moe.activation.value}": moe.activation.value != "silu",
        "biases": moe.has_bias,
        "a clamped SwiGLU": any(
            getattr(layer, name, None) is not None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
        ),
        "router weights on the input": layer.apply_router_weight_on_input,
        "fused shared experts": layer.expert_map_manager.num_fused_shared_experts > 0,
        "redundant experts": moe.num_experts != moe.num_logical_experts,
        "LoRA": moe.is_lora_enabled,
        "a transposed fused checkpoint": layer.is_fused_checkpoint_transposed,
    }
    found = [name for name, differs in differences.items() if differs]
    if found:
        raise DraftToolsError(f"cannot keep the experts of {layer.layer_name} in FP8: they use {', '.join(found)}")
