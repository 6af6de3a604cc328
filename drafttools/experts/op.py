"""The operator `drafttools::fp8_experts`: schema, shape function and CPU implementation.

A CUDA implementation registers against the same schema (`drafttools.experts.extension`); importing this
module is enough to use the operator on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

NAME = "drafttools::fp8_experts"
SCHEMA = (
    "(Tensor x, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor topk_weights, "
    "Tensor topk_ids, int block_n, int block_k, int w13_offset, int w2_offset) -> Tensor"
)
CHUNK_TOKENS = 512  # bounds the FP32 scratch of the CPU implementation


def fp8_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    block_n: int,
    block_k: int,
    w13_offset: int,
    w2_offset: int,
) -> torch.Tensor:
    """Run every token through its experts and add up the weighted results.

    out[m] = sum over j of topk_weights[m, j] * down(silu(gate(x[m])) * up(x[m])) of expert topk_ids[m, j];
    products accumulate in FP32. An id outside [0, E) contributes nothing (vLLM marks padding rows with -1,
    vllm 0.32.0 model_executor/layers/fused_moe/router/base_router.py); a repeated id counts each time.

    Args:
        x: [M, H], FP16, BF16 or FP32 (CUDA: FP16); M may be 0.
        w13: [E, 2I, H] E4M3, gate rows then up rows.
        w13_scale: FP32. One per row, [E, 2I], when block_n = block_k = 0; else
            [E, 2 * blocks, ceil(H / block_k)] with blocks = ceil((w13_offset + I) / block_n), gate then up.
        w2: [E, H, I] E4M3.
        w2_scale: FP32. [E, H], or [E, ceil(H / block_n), ceil((w2_offset + I) / block_k)].
        topk_weights: [M, k], FP32.
        topk_ids: [M, k], int32 or int64.
        block_n: rows a scale block covers in the whole (unsharded) weight; 0 for one scale per row.
        block_k: columns a scale block covers; 0 for one scale per row.
        w13_offset: where this rank's I rows begin in their first block, for gate and up alike; 0 for rows.
        w2_offset: where this rank's I columns begin in their first block; 0 for rows.

    Returns:
        [M, H] in x's dtype.
    """
    out: torch.Tensor = torch.ops.drafttools.fp8_experts(
        x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, block_n, block_k, w13_offset, w2_offset
    )
    return out


def dequantize_w13(
    w13: torch.Tensor,
    scale: torch.Tensor,
    block_n: int,
    block_k: int,
    offset: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gate and up of one expert as `dtype`: w13 [2I, H], scale [2I] or [2 * blocks, ceil(H / block_k)]."""
    if not block_n:
        return w13.to(dtype) * scale.to(dtype).unsqueeze(-1)
    half = w13.shape[0] // 2
    row = (torch.arange(half, device=w13.device) + offset) // block_n
    rows = torch.cat([row, row + scale.shape[0] // 2])
    columns = torch.arange(w13.shape[1], device=w13.device) // block_k
    return w13.to(dtype) * scale.to(dtype)[rows][:, columns]


def dequantize_w2(
    w2: torch.Tensor,
    scale: torch.Tensor,
    block_n: int,
    block_k: int,
    offset: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Down projection of one expert as `dtype`: w2 [H, I] with scale [H] or [ceil(H / block_n), blocks]."""
    if not block_n:
        return w2.to(dtype) * scale.to(dtype).unsqueeze(-1)
    rows = torch.arange(w2.shape[0], device=w2.device) // block_n
    columns = (torch.arange(w2.shape[1], device=w2.device) + offset) // block_k
    return w2.to(dtype) * scale.to(dtype)[rows][:, columns]


def check_arguments(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    block_n: int,
    block_k: int,
    w13_offset: int,
    w2_offset: int,
) -> None:
    """Refuse shapes and dtypes the schema does not mean (ValueError); reads no tensor data."""
    experts, hidden, local = w2.shape
    if w13.dtype != torch.float8_e4m3fn or w2.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{NAME}: w13 and w2 must be float8_e4m3fn, got {w13.dtype} and {w2.dtype}")
    if w13_scale.dtype != torch.float32 or w2_scale.dtype != torch.float32:
        raise ValueError(f"{NAME}: scales must be float32, got {w13_scale.dtype} and {w2_scale.dtype}")
    if (block_n == 0) != (block_k == 0) or min(block_n, block_k, w13_offset, w2_offset) < 0:
        raise ValueError(f"{NAME}: block_n and block_k are both 0 or both positive, offsets are not negative")
    if block_n:
        w13_blocks = [2 * _cdiv(w13_offset + local, block_n), _cdiv(hidden, block_k)]
        w2_blocks = [_cdiv(hidden, block_n), _cdiv(w2_offset + local, block_k)]
    else:
        w13_blocks, w2_blocks = [2 * local], [hidden]
    expected = {
        "x": (x, [x.shape[0], hidden]),
        "w13": (w13, [experts, 2 * local, hidden]),
        "w13_scale": (w13_scale, [experts, *w13_blocks]),
        "w2_scale": (w2_scale, [experts, *w2_blocks]),
        "topk_weights": (topk_weights, [x.shape[0], topk_ids.shape[-1]]),
        "topk_ids": (topk_ids, [x.shape[0], topk_ids.shape[-1]]),
    }
    for name, (tensor, shape) in expected.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"{NAME}: {name} has shape {list(tensor.shape)}, expected {shape}")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _slots_by_expert(topk_ids: torch.Tensor, experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(expert, flat slots that chose it) for each expert in use, ascending, without ids outside [0, E)."""
    flat = topk_ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat.clamp(-1, experts) + 1, minlength=experts + 2).tolist()
    end = 0
    for expert, count in enumerate(counts, start=-1):
        start, end = end, end + count
        if count and 0 <= expert < experts:
            yield expert, order[start:end]


def _cpu(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    block_n: int,
    block_k: int,
    w13_offset: int,
    w2_offset: int,
) -> torch.Tensor:
    check_arguments(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, block_n, block_k, w13_offset, w2_offset)
    top_k = topk_ids.shape[1]
    weights = topk_weights.reshape(-1, 1).float()
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert, slots in _slots_by_expert(topk_ids, w13.shape[0]):
        gate_up = dequantize_w13(w13[expert], w13_scale[expert], block_n, block_k, w13_offset)
        down = dequantize_w2(w2[expert], w2_scale[expert], block_n, block_k, w2_offset)
        for part in slots.split(CHUNK_TOKENS):
            tokens = part // top_k
            gate, up = (x[tokens].float() @ gate_up.T).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
            out.index_add_(0, tokens, (hidden @ down.T) * weights[part])
    return out.to(x.dtype)


def _fake(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    block_n: int,
    block_k: int,
    w13_offset: int,
    w2_offset: int,
) -> torch.Tensor:
    return x.new_empty(x.shape)


torch.library.define(NAME, SCHEMA)
torch.library.impl(NAME, "cpu")(_cpu)
torch.library.register_fake(NAME)(_fake)
