"""Tiny MiMo checkpoints: a quantized target with one MTP layer left in BF16 beside it.

Both are built to compute, not trained: a one-hot embedding, attention that adds nothing, and an MLP that maps a token
to its successor under a fixed permutation, so a draft that runs as shipped is right every time and one whose MLP is
misread repeats the last token and never is. MiMo, because its MTP layer is dense and takes the target's quantization
config (vllm/model_executor/models/mimo_mtp.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = HIDDEN = INTERMEDIATE = 256
LAYERS, HEADS, GROUP = 2, 4, 64
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["MiMoForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}


def write(directory: Path, quantization: str) -> Path:
    """Write `directory` with a target quantized by one of QUANTIZATION and a BF16 draft layer; returns it."""
    directory.mkdir(parents=True)
    eye = torch.eye(VOCAB, HIDDEN)
    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": eye,
        "lm_head.weight": eye.clone(),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        linears = _linears(active=layer == LAYERS - 1)
        for name, weight in linears.items():
            for role, tensor in _quantize(weight, quantization).items():
                tensors[f"model.layers.{layer}.{name}.{role}"] = tensor
        tensors |= _block(f"model.layers.{layer}")
    draft = "model.mtp_layers.0"
    tensors |= {f"{draft}.{name}.weight": weight for name, weight in _linears(active=True).items()}
    tensors |= _block(draft)
    tensors[f"{draft}.input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN) / 16], dim=1)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{draft}.{norm}.weight"] = torch.ones(HIDDEN)
    floats = {
        k: v.to(torch.bfloat16) if v.is_floating_point() and not k.endswith("scale") else v for k, v in tensors.items()
    }
    save_file(
        {k: v.contiguous() for k, v in floats.items()}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": QUANTIZATION[quantization]}))
    return directory


def successor(token: int) -> int:
    """The token the model puts after `token`."""
    return (token * 5 + 3) % VOCAB


def _linears(active: bool) -> dict[str, torch.Tensor]:
    """Weights [out, in] of one decoder layer; attention adds nothing, and the MLP only where `active`."""
    weights = {name: torch.eye(HIDDEN) / 16 for name in LINEARS}
    weights["self_attn.o_proj"] = torch.zeros(HIDDEN, HIDDEN)
    permutation = torch.zeros(HIDDEN, INTERMEDIATE)
    for token in range(VOCAB):
        permutation[successor(token), token] = 0.5
    weights["mlp.gate_proj"] = torch.eye(INTERMEDIATE, HIDDEN) / 2
    weights["mlp.up_proj"] = torch.eye(INTERMEDIATE, HIDDEN) / 2
    weights["mlp.down_proj"] = permutation if active else torch.zeros(HIDDEN, INTERMEDIATE)
    return weights


def _block(prefix: str) -> dict[str, torch.Tensor]:
    """What a Qwen2 decoder layer has besides its weights."""
    biases = {f"{prefix}.{name}.bias": torch.zeros(HIDDEN) for name in LINEARS[:3]}
    norms = ("input_layernorm", "post_attention_layernorm")
    return biases | {f"{prefix}.{name}.weight": torch.ones(HIDDEN) for name in norms}


def _quantize(weight: torch.Tensor, quantization: str) -> dict[str, torch.Tensor]:
    """Quantize a weight [out, in] into the tensors its format stores."""
    if quantization == "compressed-tensors":
        scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-8)
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.float()}
    out, columns = weight.shape
    groups = weight.t().reshape(columns // GROUP, GROUP, out)  # both formats scale runs of GROUP inputs
    scales = (groups.abs().amax(dim=1) / 7).clamp(min=1e-4)
    codes = ((groups / scales[:, None]).round() + 8).to(torch.int64).reshape(columns, out)
    zeros = torch.full((columns // GROUP, out), 8, dtype=torch.int64)
    if quantization == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ's interleaving of eight outputs in one int32
        return {"qweight": _pack(codes, order), "qzeros": _pack(zeros, order), "scales": scales.to(torch.bfloat16)}
    plain = list(range(8))
    return {
        "qweight": _pack(codes.t(), plain).t(),
        "qzeros": _pack(zeros - 1, plain),  # GPTQ stores the zero point less one
        "scales": scales.to(torch.bfloat16),
        "g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
    }


def _pack(codes: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Pack eight 4-bit codes of the last dimension into an int32, the code at `order[i]` at bit 4 i."""
    words = codes.reshape(*codes.shape[:-1], -1, 8)
    packed = sum(words[..., source] << (4 * place) for place, source in enumerate(order))
    return torch.as_tensor(packed).to(torch.int32) if isinstance(packed, int) else packed.to(torch.int32)
