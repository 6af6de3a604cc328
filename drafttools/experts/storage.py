"""How FP8 experts are kept: rows quantized on the way in, or a rank's slice of a block-quantized weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafttools.errors import DraftToolsError

E4M3_MAX = 448.0  # largest finite float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)  # all exact in FP32


class ExpertWeightError(DraftToolsError, ValueError):
    """An expert tensor that cannot be stored as FP8; the message names it."""


@dataclass(frozen=True)
class ExpertSlice:
    """One rank's part of a block-quantized weight, with the checkpoint's own bytes.

    Attributes:
        weight: [..., N, K] E4M3, the slice.
        scale: FP32, [..., blocks along N, blocks along K], the blocks the slice touches.
        offset: where the slice begins inside its first block, along `axis`.
        axis: the sliced axis, counted from the end: -2 (rows) or -1 (columns).
        block: rows and columns a block covers in the whole weight.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: int
    axis: int = -2
    block: int = 128


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to E4M3 with its own scale, absmax / 448.

    Args:
        weight: [..., N, K], FP16 or BF16; not modified.

    Returns:
        E4M3 [..., N, K] and FP32 scales [..., N]. A scale is never below the smallest normal FP32, so a zero
        row (or one of tiny BF16 subnormals) keeps a finite, nonzero scale.

    Raises:
        ExpertWeightError: another dtype, fewer than two axes, or a value that is not finite.
    """
    if weight.dtype not in (torch.float16, torch.bfloat16) or weight.ndim < 2:
        raise ExpertWeightError(f"rows to quantize must be FP16 or BF16 [N, K], got {_describe(weight)}")
    values = weight.float()
    largest = values.abs().amax(dim=-1)
    if not bool(torch.isfinite(largest).all()):
        raise ExpertWeightError(f"rows to quantize hold NaN or infinity ({_describe(weight)})")
    scale = (largest / E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    quantized = values.div_(scale.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantized, scale


def slice_block_fp8(
    weight: torch.Tensor, scale: torch.Tensor, *, axis: int, tp_size: int, tp_rank: int, block: int = 128
) -> ExpertSlice:
    """Cut one tensor-parallel rank's part out of a block-quantized weight, without padding or requantizing.

    The rank's N / tp_size rows (or columns) need not begin at a block: the slice brings every block it
    touches and says where in the first one it begins, so dequantizing it gives what slicing the dequantized
    whole would, bit for bit.

    Args:
        weight: [..., N, K] E4M3.
        scale: [..., ceil(N / block), ceil(K / block)], FP32 (BF16, FP16 and E8M0 are widened, exactly).
        axis: 0 or -2 for rows, 1 or -1 for columns of a 2-D weight.
        tp_size: number of ranks; must divide the axis.
        tp_rank: this rank.
        block: rows and columns a scale covers.

    Raises:
        ExpertWeightError: wrong dtype or shape, an axis that tp_size does not divide, or a scale that is
            negative, NaN or infinite.
    """
    axis = axis - weight.ndim if axis >= 0 else axis
    if weight.dtype != torch.float8_e4m3fn or weight.ndim < 2 or axis not in (-2, -1):
        raise ExpertWeightError(
            f"expected an E4M3 [N, K] weight and an axis of it, got {_describe(weight)}, axis {axis}"
        )
    scale = checked_scale(scale)
    blocks = [*weight.shape[:-2], *(-(-size // block) for size in weight.shape[-2:])]
    if list(scale.shape) != blocks:
        raise ExpertWeightError(f"scale has shape {list(scale.shape)}, expected {blocks} for {_describe(weight)}")
    width = weight.shape[axis]
    if not 0 <= tp_rank < tp_size or width % tp_size:
        raise ExpertWeightError(f"cannot cut {width} into {tp_size} equal parts and take part {tp_rank}")
    local = width // tp_size
    first, count, offset = touched_blocks(local, tp_rank, block)
    return ExpertSlice(
        weight.narrow(axis, tp_rank * local, local), scale.narrow(axis, first, count), offset, axis, block
    )


def touched_blocks(local: int, tp_rank: int, block: int = 128) -> tuple[int, int, int]:
    """(first block, number of blocks, offset in the first block) of a rank's `local` rows or columns."""
    start = tp_rank * local
    first = start // block
    return first, -(-(start + local) // block) - first, start % block


def dequantize(part: ExpertSlice) -> torch.Tensor:
    """The slice as FP32 [..., N, K]: each E4M3 value times its block's scale, rounded once."""
    rows, columns = part.weight.shape[-2:]
    begin = {-2: 0, -1: 0, part.axis: part.offset}
    row = (torch.arange(rows, device=part.weight.device) + begin[-2]) // part.block
    column = (torch.arange(columns, device=part.weight.device) + begin[-1]) // part.block
    return part.weight.float() * part.scale.index_select(-2, row).index_select(-1, column)


def checked_scale(scale: torch.Tensor) -> torch.Tensor:
    """`scale` as FP32; ExpertWeightError for a negative, NaN or infinite value or a dtype no scale has."""
    if scale.dtype not in SCALE_DTYPES:
        raise ExpertWeightError(f"a scale must be FP32, BF16, FP16 or E8M0, got {_describe(scale)}")
    scale = scale.float()
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise ExpertWeightError(f"scale holds a negative, NaN or infinite value ({_describe(scale)})")
    return scale


def has_nan(weight: torch.Tensor) -> bool:
    """Whether an E4M3 tensor holds one of the two NaN bytes, 0x7f and 0xff."""
    return bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any())


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
