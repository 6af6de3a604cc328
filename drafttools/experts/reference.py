"""FP64 reference of the operator: the plain formula on dequantized experts, for tests and benchmarks."""

from __future__ import annotations

import torch

from drafttools.experts.op import dequantize_w2, dequantize_w13


def fp8_experts_reference(
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
    """The operator's arguments (see `drafttools.experts.op.fp8_experts`) on any device; returns [M, H] FP64.

    Goes token by token in the order of the formula and shares only the dequantization with the operator,
    which the storage tests hold against slices of the whole weight.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    ids = topk_ids.tolist()
    experts = {e for row in ids for e in row if 0 <= e < w13.shape[0]}
    dense = {
        e: (
            dequantize_w13(w13[e], w13_scale[e], block_n, block_k, w13_offset, torch.float64),
            dequantize_w2(w2[e], w2_scale[e], block_n, block_k, w2_offset, torch.float64),
        )
        for e in sorted(experts)
    }
    for m, row in enumerate(ids):
        for j, e in enumerate(row):
            if e in dense:
                w13_e, w2_e = dense[e]
                gate, up = (w13_e @ x[m].double()).chunk(2)
                hidden = gate * torch.sigmoid(gate) * up
                out[m] += topk_weights[m, j].double() * (w2_e @ hidden)
    return out
