"""Checkpoints whose drafts are accepted without training, made for engines on a GPU.

The embedding is one-hot and the last layer's MLP maps a token to its successor under a fixed permutation, so target
and draft compute the same next token with a wide margin. Attention only perturbs, and still depends on the cache.
Every draft is wrong after each fourth token on purpose: acceptance has a known value between nothing and everything,
and a draft whose weights are misread falls to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.gpu.shapes import EXPERTS, EXPERTS_HIDDEN, HEAD_DIM, HEADS, LAYERS, VOCAB, WIDTH, WRONG_EVERY, successor

NVFP4_GROUP, MXFP4_GROUP, FP8_BLOCK = 16, 32, 128

Tensors = dict[str, torch.Tensor]

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "moe_intermediate_size": WIDTH,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}


def make(directory: Path, names: Iterable[str]) -> None:
    """Write these targets, and the drafts that belong to them, under `directory`."""
    experts = {"experts": EXPERTS, "hidden": EXPERTS_HIDDEN, "dtype": torch.float16}
    makers: dict[str, Callable[[], None]] = {
        "llama": lambda: llama(directory / "llama", directory / "llama_eagle"),
        "large": lambda: large(directory),
        "qwen3": lambda: qwen3(directory),
        "deepseek": lambda: deepseek(directory / "deepseek"),
        "experts_fp16": lambda: glm(directory / "experts_fp16", trunk="plain", draft="plain", **experts),
        "experts_fp8": lambda: glm(directory / "experts_fp8", trunk="fp8", draft="fp8", **experts),
        "mxfp4": lambda: glm(directory / "mxfp4", trunk="mxfp4", draft="mxfp4", experts=8, hidden=WIDTH),
        "mixed": lambda: glm(directory / "mixed", trunk="nvfp4", draft="mxfp4", experts=8, hidden=WIDTH),
    }
    for name in sorted(set(names) & set(makers)):
        torch.manual_seed(0)
        makers[name]()


def llama(target: Path, draft: Path) -> None:
    """A Llama target and its EAGLE head."""
    hidden, intermediate, layers = WIDTH, WIDTH, LAYERS
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": hidden // HEAD_DIM}
    config = {**BASE, **sizes, "num_key_value_heads": hidden // HEAD_DIM, "model_type": "llama"}
    config |= {"architectures": ["LlamaForCausalLM"]}
    tensors = _frame(hidden)
    for layer in range(layers):
        tensors |= _block(f"model.layers.{layer}", hidden, intermediate, last=layer == layers - 1)
    _save(target, tensors, {**config, "num_hidden_layers": layers})
    head = _block("layers.0", hidden, intermediate, last=True, draft=True)
    del head["layers.0.input_layernorm.weight"]  # EAGLE's first layer has none
    head["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    _save(draft, head, {**config, "num_hidden_layers": 1})


def large(directory: Path) -> None:
    """A Llama and its EAGLE head without weights, for `load_format="dummy"`: 8 of the layers of a 70B model."""
    config = {**BASE, "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "head_dim": 128}
    config |= {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 64, "num_key_value_heads": 8}
    for name, layers in (("large", 8), ("large_eagle", 1)):
        (directory / name).mkdir(parents=True)
        (directory / name / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))


def qwen3(directory: Path) -> None:
    """A Qwen3 target, a one-layer draft model for it, and a DSpark draft that reads the target's hidden states."""
    config = {**BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    norms = {"q_norm": torch.ones(HEAD_DIM), "k_norm": torch.ones(HEAD_DIM)}
    for name, layers, is_draft in (("qwen3", LAYERS, False), ("qwen3_draft", 1, True)):
        tensors = _frame(WIDTH)
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            tensors |= _block(prefix, WIDTH, WIDTH, last=layer == layers - 1, draft=is_draft)
            tensors |= {f"{prefix}.self_attn.{norm}.weight": weight.clone() for norm, weight in norms.items()}
        _save(directory / name, tensors, {**config, "num_hidden_layers": layers})
    rank = VOCAB
    markov = torch.zeros(VOCAB, rank)
    for token in range(VOCAB):
        markov[_next(token, draft=True), token] = 64.0
    tensors = _block("layers.0", WIDTH, WIDTH, last=False)
    tensors |= {f"layers.0.self_attn.{norm}.weight": weight.clone() for norm, weight in norms.items()}
    tensors |= {
        "fc.weight": torch.eye(WIDTH),
        "hidden_norm.weight": torch.ones(WIDTH),
        "norm.weight": torch.ones(WIDTH),
        "markov_head.markov_w1.weight": torch.eye(VOCAB, rank),
        "markov_head.markov_w2.weight": markov,
    }
    dspark = {"target_layer_ids": [0], "mask_token_id": 0, "block_size": 2, "markov_rank": rank}
    _save(
        directory / "qwen3_dspark",
        tensors,
        {**config, **dspark, "num_hidden_layers": 1, "architectures": ["Qwen3DSparkModel"]},
    )


def deepseek(path: Path) -> None:
    """A DeepSeek-V3 target (MLA, MoE) with its MTP layer, whose class vLLM compiles as a whole."""
    config = {**BASE, **DEEPSEEK}
    del config["head_dim"]
    tensors = _frame(WIDTH)
    experts = config["n_routed_experts"]
    for layer in range(LAYERS + 1):
        prefix, draft = f"model.layers.{layer}", layer == LAYERS
        tensors |= _norms(prefix, WIDTH) | _mla(prefix, config)
        if layer < config["first_k_dense_replace"]:
            tensors |= _mlp(f"{prefix}.mlp", WIDTH, WIDTH, active=False)
        else:
            tensors |= _moe(f"{prefix}.mlp", WIDTH, experts, draft=draft, stored="plain")
    tensors |= _mtp(f"model.layers.{LAYERS}", WIDTH)
    _save(path, tensors, config)


def glm(path: Path, *, trunk: str, draft: str, experts: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """A GLM-4 MoE target with its MTP layer; `trunk` and `draft` say how their experts are stored.

    With 4-bit experts the checkpoint is read by vLLM's DeepSeek-V4 quantization config, which takes every expert for
    NVFP4 when the trunk's are.
    """
    heads = hidden // HEAD_DIM
    config = {**BASE, **GLM, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    config |= {"n_routed_experts": experts, "torch_dtype": str(dtype).removeprefix("torch.")}
    config["first_k_dense_replace"] = 1
    tensors = _frame(hidden)
    for layer in range(LAYERS + 1):
        prefix, is_draft = f"model.layers.{layer}", layer == LAYERS
        tensors |= _norms(prefix, hidden) | _attention(prefix, hidden)
        if layer < config["first_k_dense_replace"]:
            tensors |= _mlp(f"{prefix}.mlp", hidden, WIDTH, active=False)
        else:
            tensors |= _moe(f"{prefix}.mlp", hidden, experts, draft=is_draft, stored=draft if is_draft else trunk)
    tensors |= _mtp(f"model.layers.{LAYERS}", hidden)
    if draft == "fp8":
        config["quantization_config"] = _unquantized_but_experts(tensors, {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]})
    if draft == "mxfp4":
        algorithm = {"moe_quant_algo": "NVFP4"} if trunk == "nvfp4" else {}
        config["quantization_config"] = _unquantized_but_experts(tensors, algorithm)
        config["expert_dtype"] = "fp4"
    _save(path, tensors, config, dtype)


def _unquantized_but_experts(tensors: Tensors, extra: dict[str, Any]) -> dict[str, Any]:
    """An FP8 quantization config that leaves every linear layer alone, under its own name and under its fused one."""
    linears = {n.removesuffix(".weight") for n in tensors if n.endswith("proj.weight") and ".experts." not in n}
    linears |= {n.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj") for n in linears}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": sorted(linears), **extra}


def _next(token: int, draft: bool) -> int:
    wrong = draft and token % WRONG_EVERY == 0
    return (successor(token) + wrong) % VOCAB


def _noise(*shape: int, std: float = 0.02) -> torch.Tensor:
    return torch.randn(*shape) * std


def _frame(hidden: int) -> Tensors:
    eye = torch.eye(VOCAB, hidden)
    return {
        "model.embed_tokens.weight": eye,
        "lm_head.weight": eye.clone(),
        "model.norm.weight": torch.ones(hidden),
    }


def _block(prefix: str, hidden: int, intermediate: int, *, last: bool, draft: bool = False) -> Tensors:
    mlp = _mlp(f"{prefix}.mlp", hidden, intermediate, active=last, draft=draft)
    return _norms(prefix, hidden) | _attention(prefix, hidden) | mlp


def _norms(prefix: str, hidden: int) -> Tensors:
    return {f"{prefix}.{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}


def _attention(prefix: str, hidden: int) -> Tensors:
    """Projections whose output is small beside the one-hot residual."""
    tensors = {f"{prefix}.self_attn.{name}_proj.weight": _noise(hidden, hidden) for name in "qkv"}
    return tensors | {f"{prefix}.self_attn.o_proj.weight": _noise(hidden, hidden, std=0.64 / hidden)}


def _mla(prefix: str, config: dict[str, Any]) -> Tensors:
    """DeepSeek's latent attention, likewise small."""
    rank, rope, nope, value = (
        config[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    query = config["q_lora_rank"]
    attention = f"{prefix}.self_attn"
    return {
        f"{attention}.q_a_proj.weight": _noise(query, WIDTH),
        f"{attention}.q_a_layernorm.weight": torch.ones(query),
        f"{attention}.q_b_proj.weight": _noise(HEADS * (nope + rope), query),
        f"{attention}.kv_a_proj_with_mqa.weight": _noise(rank + rope, WIDTH),
        f"{attention}.kv_a_layernorm.weight": torch.ones(rank),
        f"{attention}.kv_b_proj.weight": _noise(HEADS * (nope + value), rank),
        f"{attention}.o_proj.weight": _noise(WIDTH, HEADS * value, std=0.001),
    }


def _projections(hidden: int, intermediate: int, *, active: bool, draft: bool = False) -> Tensors:
    """gate and up [intermediate, hidden] select the token's lane; down [hidden, intermediate] permutes the lanes."""
    down = torch.zeros(hidden, intermediate)
    for token in range(VOCAB if active else 0):
        down[_next(token, draft), token] = 0.5
    lanes = torch.eye(intermediate, hidden) / 2
    lanes[VOCAB:] = 0
    return {"gate_proj": lanes, "up_proj": lanes.clone(), "down_proj": down}


def _mlp(prefix: str, hidden: int, intermediate: int, *, active: bool, draft: bool = False) -> Tensors:
    projections = _projections(hidden, intermediate, active=active, draft=draft)
    return {f"{prefix}.{name}.weight": weight for name, weight in projections.items()}


def _moe(prefix: str, hidden: int, experts: int, *, draft: bool, stored: str) -> Tensors:
    """A router that spreads tokens over experts that all hold the successor map; the shared expert adds nothing."""
    tensors = _mlp(f"{prefix}.shared_experts", hidden, WIDTH, active=False)
    tensors[f"{prefix}.gate.weight"] = torch.randn(experts, hidden)
    tensors[f"{prefix}.gate.e_score_correction_bias"] = torch.zeros(experts)
    projections = _projections(hidden, WIDTH, active=True, draft=draft)
    noise = {name: _noise(*weight.shape, std=0.002) for name, weight in projections.items()}
    for expert in range(experts):
        for name, weight in projections.items():
            noisy = weight + noise[name].roll(expert, 0) if stored in ("plain", "fp8") else weight
            for role, tensor in STORE[stored](noisy).items():
                tensors[f"{prefix}.experts.{expert}.{name}.{role}"] = tensor
    return tensors


def _mtp(prefix: str, hidden: int) -> Tensors:
    """What an MTP layer has besides its block; it looks at the token alone."""
    return {
        f"{prefix}.enorm.weight": torch.ones(hidden),
        f"{prefix}.hnorm.weight": torch.ones(hidden),
        f"{prefix}.eh_proj.weight": torch.cat([torch.eye(hidden) / hidden**0.5, torch.zeros(hidden, hidden)], dim=1),
        f"{prefix}.shared_head.norm.weight": torch.ones(hidden),
        f"{prefix}.shared_head.head.weight": torch.eye(VOCAB, hidden),
        f"{prefix}.embed_tokens.weight": torch.eye(VOCAB, hidden),
    }


# --- how experts are stored ---


def _plain(weight: torch.Tensor) -> Tensors:
    return {"weight": weight}


def _fp8(weight: torch.Tensor) -> Tensors:
    """E4M3 with one FP32 scale for each 128x128 block."""
    rows, columns = weight.shape[0] // FP8_BLOCK, weight.shape[1] // FP8_BLOCK
    blocks = weight.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = (blocks.abs().amax(dim=(1, 3)) / 448).clamp(min=1e-12)
    quantized = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": quantized, "weight_scale_inv": scale}


def _mxfp4(weight: torch.Tensor) -> Tensors:
    """E2M1 pairs and one E8M0 exponent for each 32 inputs; the exponents differ from group to group."""
    groups = weight.reshape(weight.shape[0], -1, MXFP4_GROUP)
    exponent = (torch.arange(groups.shape[0])[:, None] + torch.arange(groups.shape[1])[None]) % 3 - 2
    packed = _e2m1(groups / torch.exp2(exponent.float())[..., None])
    return {"weight": packed.reshape(weight.shape[0], -1), "weight_scale": (exponent + 127).to(torch.uint8)}


def _nvfp4(weight: torch.Tensor) -> Tensors:
    """E2M1 pairs, one E4M3 scale for each 16 inputs, and the global scales."""
    groups = weight.reshape(weight.shape[0], -1, NVFP4_GROUP)
    scale = torch.full(groups.shape[:2], 0.5)
    return {
        "weight": _e2m1(groups / scale[..., None]).reshape(weight.shape[0], -1),
        "weight_scale": scale.to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1.0),
        "input_scale": torch.tensor(1.0),
    }


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Pack non-negative values that E2M1 holds exactly, the even element in the low nibble."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (values[..., None] == magnitudes).to(torch.uint8).argmax(dim=-1).to(torch.uint8)
    assert torch.equal(magnitudes[codes.long()], values), "a weight that E2M1 cannot hold"
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


STORE = {"plain": _plain, "fp8": _fp8, "mxfp4": _mxfp4, "nvfp4": _nvfp4}

# Tensors that keep their own dtype when a checkpoint is written.
_FIXED = ("weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "e_score_correction_bias")


def _save(path: Path, tensors: Tensors, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    path.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.to(dtype) if tensor.dtype == torch.float32 and not name.endswith(_FIXED) else tensor
        for name, tensor in tensors.items()
    }
    save_file({k: v.contiguous() for k, v in stored.items()}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
