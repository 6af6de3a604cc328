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

    Works through the formula one expert at a time and shares only the dequantization with the operator, which
    the tests hold against slices of the whole weight.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(w13.shape[0]):
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        if not len(token):
            continue
        gate_up = dequantize_w13(w13[expert], w13_scale[expert], block_n, block_k, w13_offset, torch.float64)
        down = dequantize_w2(w2[expert], w2_scale[expert], block_n, block_k, w2_offset, torch.float64)
        gate, up = (x[token].double() @ gate_up.T).chunk(2, dim=-1)
        hidden = gate * torch.sigmoid(gate) * up
        out.index_add_(0, token, topk_weights[token, choice].double()[:, None] * (hidden @ down.T))
    return out
